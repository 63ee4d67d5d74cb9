"""The tape of a deferred build: what was done to which storage, which of it matters, and running it for real."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

Sink = Callable[[str, Tensor], None]

aten = torch.ops.aten
_META = torch.device("meta")
RECORDED_WHOLE = "_no_grad_trunc_normal_"  # of nn.init; remembered as one operation, for it reads what it draws
_OVERWRITING = {  # write their first argument and do not read it
    *(aten.normal_, aten.uniform_, aten.bernoulli_, aten.exponential_, aten.log_normal_, aten.cauchy_),
    *(aten.geometric_, aten.random_, aten.zero_, aten.fill_, aten.copy_, getattr(nn.init, RECORDED_WHOLE, None)),
}
GETTERS = {getattr(Tensor, name).__get__: name for name in ("device", "is_meta", "is_cpu", "is_cuda")}
READERS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__format__}  # read without dispatching
_NOWHERE = -1  # the storage of a tensor of which only the shape matters
_marks = count(0x5EED_0000_0000)  # one number after the other for the life of the process: marks of two tapes differ


def storage_key(tensor: Tensor) -> int:
    """Names a storage; it stays taken for as long as somebody holds it."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in a structure of arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes."""
    if not isinstance(func, torch._ops.OpOverload):  # remembered as one operation
        return [args[0]]
    formal = func._schema.arguments
    actual = [*zip(formal, args, strict=False), *((arg, kwargs[arg.name]) for arg in formal if arg.name in kwargs)]
    return tensors_in([value for arg, value in actual if arg.alias_info is not None and arg.alias_info.is_write])


def meta_twin(tensor: Tensor) -> Tensor:
    """A tensor on meta that is laid out alike."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def is_random(func: Any) -> bool:
    """Whether an operation draws from a generator."""
    return not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in func.tags


def reads_only_shape(func: Any) -> bool:
    """Whether an operation takes nothing from its arguments but shapes and dtypes."""
    name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
    return name.endswith("_like") or name.startswith("aten::new_")


def makes_no_values(func: Any) -> bool:
    """Whether an operation makes tensors without values."""
    return "empty" in func._schema.name if isinstance(func, torch._ops.OpOverload) else False


def meta_options(func: Any, args: Any, kwargs: Any) -> Any:
    """The keyword arguments with which ``func`` makes only shapes."""
    takes_device = any(arg.name == "device" for arg in func._schema.arguments)
    on_meta = takes_device and (kwargs.get("device") is not None or not tensors_in((args, kwargs)))
    kwargs = {**kwargs, "device": _META} if on_meta else kwargs
    return {key: None if key in ("generator", "pin_memory") else value for key, value in kwargs.items()}


def _covers_storage(tensor: Tensor) -> bool:
    whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    return whole and torch.empty_like(tensor, device=_META).stride() == tensor.stride()  # like keeps only dense strides


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which operations on a device draw unless they are given one."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    module.init()
    generator: torch.Generator = module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
    return generator


@dataclass(frozen=True)
class Ref:
    """A tensor as a window on a storage, so that views, ``.data`` and transposes need no record of their own."""

    storage: int
    dtype: torch.dtype
    window: tuple[Any, torch.Size, tuple[int, ...]]
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Ref":
        """The window through which this tensor looks."""
        window = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return cls(storage_key(tensor), tensor.dtype, window, tensor.is_conj(), tensor.is_neg())

    @classmethod
    def of_shape(cls, tensor: Tensor) -> "Ref":
        """A tensor of which only the shape matters."""
        return cls(_NOWHERE, tensor.dtype, (0, tensor.shape, tensor.stride()), False, False)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The same window on another storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, *self.window)
        tensor = tensor.conj() if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor


class Stream:
    """A generator during the build: nothing is drawn, yet seeding it or putting it back must not go unseen.

    | state of the generator | while               | stands for                                                    |
    |------------------------|---------------------|---------------------------------------------------------------|
    | `start`                | before any draw     | itself                                                        |
    | a mark of its own      | after a draw        | the state after that draw, known only when it is replayed     |
    | a mark seen before     | somebody put it back | the state after that earlier draw: `moved` says which        |
    | any other              | somebody seeded it  | itself: `moved` says what                                     |
    | `outside`              | the build is left   | what the user's script goes on from                           |
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.start = self._outside = self._inside = self._expected = generator.get_state()
        self.final: Tensor | int | None = None
        self._seen = {self._bytes(self.start): -1}  # state -> the draw after which the build was in it; -1: the start

    def moved(self) -> Tensor | int | None:
        """A state to which somebody moved the generator since the last draw, or the draw that left it so."""
        state = self.generator.get_state()
        return None if torch.equal(state, self._expected) else self._seen.get(self._bytes(state), state)

    def mark(self, position: int) -> None:
        """The build draws at this position of the tape."""
        self.generator.manual_seed(next(_marks))  # stands for the state after this draw, known only to the replay
        self._expected = self.generator.get_state()
        self._seen[self._bytes(self._expected)] = position

    def open(self) -> None:
        """The build begins, or goes on."""
        if torch.equal(self.generator.get_state(), self._outside):  # goes on where the build was left
            self.generator.set_state(self._inside)

    def close(self) -> None:
        """The build is over: the generator is as it was before."""
        self.final = self.moved()
        self._inside = self.generator.get_state()
        self.generator.set_state(self._outside)

    @staticmethod
    def _bytes(state: Tensor) -> bytes:
        return state.numpy().tobytes()


class Effects(NamedTuple):
    """Storages by what an operation does to them; what it makes counts as written and overwritten."""

    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]  # whole, unseen

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any) -> "Effects":
        """The effects of one call."""
        if reads_only_shape(func):
            return cls(frozenset(), frozenset(), frozenset())
        tensors, targets = tensors_in((args, kwargs)), written(func, args, kwargs)
        blind = getattr(func, "overloadpacket", func) in _OVERWRITING
        whole = (tensor for tensor in targets[:1] if blind and _covers_storage(tensor))
        reads = tensors[1:] if blind else tensors
        return cls(*(frozenset(map(storage_key, each)) for each in (reads, targets, whole)))

    def and_makes(self, made: set[int]) -> "Effects":
        """These effects, with the storages that the call made."""
        return Effects(self.reads, self.writes | made, self.overwrites | made)


@dataclass(frozen=True)
class Op:
    """A remembered operation, its tensors replaced by refs."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    made: list[Ref | None]
    effects: Effects
    dtype: torch.dtype  # the default
    stream: Stream | None  # what it draws from
    moved: Tensor | int | None  # see Stream.moved


class _Turn(NamedTuple):
    position: int | None
    finished: int | None
    freed: frozenset[int]


def needed_by(tape: list[Op], live: frozenset[int], draws: bool) -> list[int]:
    """The operations that ``live`` storages come from, and all draws: one on a dead storage still advances."""
    needed = []
    for position in reversed(range(len(tape))):
        op = tape[position]
        if op.effects.writes & live or (draws and op.stream):
            needed.append(position)
            live = live - op.effects.overwrites | op.effects.reads
    return needed[::-1]


class _Order:
    """The order of needed operations: those on one storage follow each other, and so do all draws."""

    def __init__(self, tape: list[Op], needed: list[int]) -> None:
        self.writer: defaultdict[int, int] = defaultdict(lambda: -1)
        self.rank = {-1: -1}  # the last draw that an operation waits for
        self.last_draw = -1
        self._after: dict[int, set[int]] = {}
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        self._taken = {-1}
        for position in needed:
            self._add(position, tape[position])

    def _add(self, position: int, op: Op) -> None:
        after = {self.writer[storage] for storage in op.effects.reads | op.effects.writes}
        after.update(
            *(self._readers.pop(storage, ()) for storage in op.effects.writes), [self.last_draw] if op.stream else []
        )
        self._after[position] = after
        self.last_draw = position if op.stream else self.last_draw
        self.rank[position] = position if op.stream else max((self.rank[each] for each in after), default=-1)
        self.writer.update(dict.fromkeys(op.effects.writes, position))
        for storage in op.effects.reads:
            self._readers[storage].add(position)

    def take(self, last: int) -> list[int]:
        """The operations that must still run for ``last`` to have run, in order."""
        found, stack = [], [last]
        while stack:
            position = stack.pop()
            if position not in self._taken:
                self._taken.add(position)
                found.append(position)
                stack.extend(self._after[position])
        return sorted(found)


def turns_of(tape: list[Op], wanted: Collection[int]) -> list[_Turn]:
    """Finishes each wanted storage right after the last draw it waits for, and frees whatever nothing reads again."""
    order = _Order(tape, needed_by(tape, frozenset(wanted), draws=True))
    runs: list[tuple[int | None, int | None]] = []
    for storage in sorted(wanted, key=lambda each: (order.rank[order.writer[each]], order.writer[each])):
        runs += [(position, None) for position in order.take(order.writer[storage])]
        runs.append((None, storage))
    runs += [(position, None) for position in order.take(order.last_draw)]
    steps, live = [], frozenset[int]()
    for position, finished in reversed(runs):
        if position is None:
            assert finished is not None
            steps.append(_Turn(None, finished, frozenset({finished}) - live))
            live |= {finished}
        else:
            op = tape[position]
            steps.append(_Turn(position, None, (op.effects.reads | op.effects.writes) - live))
            live = live - op.effects.overwrites | op.effects.reads
    return steps[::-1]


class Recording(Protocol):
    """A recorded build, as far as a run needs it."""

    tape: list[Op]
    streams: dict[torch.Generator, Stream]
    storages: dict[int, torch.UntypedStorage]
    homes: dict[int, torch.device]


class Replay:
    """Runs operations for real, on the storages that are real at the moment."""

    def __init__(self, record: Recording, copy: bool = False) -> None:
        self._record = record
        self._copy = copy  # real tensors from outside, so that they do not change
        self._real: dict[int, torch.UntypedStorage] = {}
        self._states: dict[int, Tensor] = {}
        moves = chain((op.moved for op in record.tape), (stream.final for stream in record.streams.values()))
        self._revisited = {move for move in moves if isinstance(move, int)}

    def tensor(self, ref: Ref) -> Tensor:
        """The real tensor, of arbitrary values where nothing has been written."""
        if ref.storage == _NOWHERE:
            return torch.empty_strided(*ref.window[1:], dtype=ref.dtype, device=_META)
        if ref.storage not in self._real:
            storage = self._record.storages[ref.storage]
            real = self._empty(storage, self._record.homes.get(ref.storage, storage.device))
            self._real[ref.storage] = real
        return ref.on(self._real[ref.storage])

    def step(self, position: int) -> None:
        """Runs the operation at a position of the tape."""
        op = self._record.tape[position]
        args, kwargs = tree_map_only(Ref, self.tensor, (op.args, op.kwargs))
        torch.set_default_dtype(op.dtype)
        if op.stream:
            self.move(op.stream, op.moved)
        results = tree_leaves(op.func(*args, **kwargs))
        if op.stream and position in self._revisited:
            self._states[position] = op.stream.generator.get_state()
        for ref, result in zip(op.made, results, strict=True):
            if ref is not None and ref.storage not in self._real:
                self._bind(ref, result)

    def free(self, storages: frozenset[int]) -> None:
        """Forgets the values of storages."""
        for storage in storages:
            self._real.pop(storage, None)

    def move(self, stream: Stream, move: Tensor | int | None) -> None:
        """Puts a generator where the build had put it."""
        if isinstance(move, int):
            move = stream.start if move < 0 else self._states[move]
        if move is not None:
            stream.generator.set_state(move)

    def _empty(self, storage: torch.UntypedStorage, home: torch.device) -> torch.UntypedStorage:
        if storage.device.type != "meta":
            return storage.clone() if self._copy else storage  # type: ignore[no-untyped-call]
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device=home).untyped_storage()

    @contextmanager
    def resumed(self, streams: Iterable[Stream]) -> Iterator[None]:
        """Generators begin where the build began and end where an ordinary build would have left them."""
        dtype = torch.get_default_dtype()
        for stream in streams:
            stream.generator.set_state(stream.start)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
        for stream in streams:
            self.move(stream, stream.final)

    def _bind(self, ref: Ref, result: Tensor) -> None:
        if Ref.of(result).window == ref.window:
            self._real[ref.storage] = result.untyped_storage()
        else:  # a kernel that lays its result out unlike its meta twin
            self.tensor(ref).copy_(result)
