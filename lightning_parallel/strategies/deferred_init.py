"""Builds a model without memory for it, and makes its tensors later, one at a time, as one process would have.

While a ``DeferredInit`` is active every tensor is made on meta and every operation is remembered. ``replay`` runs those
that matter, every draw among them and in its place, so that each weight is finished, handed over and freed early.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Sink = Callable[[str, Tensor], None]

aten = torch.ops.aten
_META = torch.device("meta")
_WHOLE = "_no_grad_trunc_normal_"  # of nn.init; remembered as one operation, for it reads what it draws
_OVERWRITING = {  # write their first argument and do not read it
    *(aten.normal_, aten.uniform_, aten.bernoulli_, aten.exponential_, aten.log_normal_, aten.cauchy_),
    *(aten.geometric_, aten.random_, aten.zero_, aten.fill_, aten.copy_, getattr(nn.init, _WHOLE, None)),
}
_GETTERS = {getattr(Tensor, name).__get__: name for name in ("device", "is_meta", "is_cpu", "is_cuda")}
_READERS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__format__}  # read without dispatching
_NOWHERE = -1  # the storage of a tensor of which only the shape matters
_marks = count(0x5EED_0000_0000)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    if not hasattr(func, "_schema"):  # the whole operation
        return [args[0]]
    formal = func._schema.arguments
    actual = [*zip(formal, args, strict=False), *((arg, kwargs[arg.name]) for arg in formal if arg.name in kwargs)]
    return _tensors([value for arg, value in actual if arg.alias_info is not None and arg.alias_info.is_write])


def _twin(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _is_random(func: Any) -> bool:
    return not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in func.tags


def _reads_only_shape(func: Any) -> bool:
    name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
    return name.endswith("_like") or name.startswith("aten::new_")


def _makes_no_values(func: Any) -> bool:
    return "empty" in func._schema.name if isinstance(func, torch._ops.OpOverload) else False


def _meta_options(func: Any, args: Any, kwargs: Any) -> Any:
    """The keyword arguments with which ``func`` makes only shapes."""
    takes_device = any(arg.name == "device" for arg in func._schema.arguments)
    on_meta = takes_device and (kwargs.get("device") is not None or not _tensors((args, kwargs)))
    kwargs = {**kwargs, "device": _META} if on_meta else kwargs
    return {key: None if key in ("generator", "pin_memory") else value for key, value in kwargs.items()}


def _covers_storage(tensor: Tensor) -> bool:
    whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    return whole and torch.empty_like(tensor, device=_META).stride() == tensor.stride()  # like keeps only dense strides


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    module.init()
    generator: torch.Generator = module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
    return generator


@dataclass(frozen=True)
class _Ref:
    """A tensor as a window on a storage, so that views, ``.data`` and transposes need no record of their own."""

    storage: int
    dtype: torch.dtype
    window: tuple[Any, torch.Size, tuple[int, ...]]
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "_Ref":
        window = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return cls(_key(tensor), tensor.dtype, window, tensor.is_conj(), tensor.is_neg())

    @classmethod
    def of_shape(cls, tensor: Tensor) -> "_Ref":
        return cls(_NOWHERE, tensor.dtype, (0, tensor.shape, tensor.stride()), False, False)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, *self.window)
        tensor = tensor.conj() if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor


class _Stream:
    """A generator during the build: nothing is drawn, yet seeding it or putting it back must not go unseen."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.start = self._outside = self._inside = self._expected = generator.get_state()
        self.final: Tensor | int | None = None
        self._seen = {self._bytes(self.start): -1}  # state -> the draw after which the build was in it; -1: the start

    def moved(self) -> Tensor | int | None:
        """Where somebody put the generator since the last draw: a state, or the draw after which it was there."""
        state = self.generator.get_state()
        return None if torch.equal(state, self._expected) else self._seen.get(self._bytes(state), state)

    def mark(self, position: int) -> None:
        self.generator.manual_seed(next(_marks))  # stands for the state after this draw, known only to the replay
        self._expected = self.generator.get_state()
        self._seen[self._bytes(self._expected)] = position

    def open(self) -> None:
        if torch.equal(self.generator.get_state(), self._outside):  # goes on where the build was left
            self.generator.set_state(self._inside)

    def close(self) -> None:
        self.final = self.moved()
        self._inside = self.generator.get_state()
        self.generator.set_state(self._outside)

    @staticmethod
    def _bytes(state: Tensor) -> bytes:
        return state.numpy().tobytes()


class _Effects(NamedTuple):
    """Storages by what an operation does to them; what it makes counts as written and overwritten."""

    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]  # whole, unseen

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any) -> "_Effects":
        if _reads_only_shape(func):
            return cls(frozenset(), frozenset(), frozenset())
        tensors, written = _tensors((args, kwargs)), _written(func, args, kwargs)
        blind = getattr(func, "overloadpacket", func) in _OVERWRITING
        whole = (tensor for tensor in written[:1] if blind and _covers_storage(tensor))
        reads = tensors[1:] if blind else tensors
        return cls(*(frozenset(map(_key, each)) for each in (reads, written, whole)))

    def and_makes(self, made: set[int]) -> "_Effects":
        return _Effects(self.reads, self.writes | made, self.overwrites | made)


@dataclass(frozen=True)
class _Op:
    """A remembered operation, its tensors replaced by refs."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    made: list[_Ref | None]
    effects: _Effects
    dtype: torch.dtype  # the default
    stream: _Stream | None  # what it draws from
    moved: Tensor | int | None  # see _Stream.moved


class _Step(NamedTuple):
    position: int | None
    finished: int | None
    freed: frozenset[int]


def _needed(tape: list[_Op], live: frozenset[int], draws: bool) -> list[int]:
    """The operations that ``live`` storages come from, and all draws: one on a dead storage still advances."""
    needed = []
    for position in reversed(range(len(tape))):
        op = tape[position]
        if op.effects.writes & live or (draws and op.stream):
            needed.append(position)
            live = live - op.effects.overwrites | op.effects.reads
    return needed[::-1]


class _Order:
    """Which needed operation must follow which: those on one storage, and the draws among themselves."""

    def __init__(self, tape: list[_Op], needed: list[int]) -> None:
        self.writer: defaultdict[int, int] = defaultdict(lambda: -1)
        self.rank = {-1: -1}  # the last draw that an operation waits for
        self.last_draw = -1
        self._after: dict[int, set[int]] = {}
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        self._taken = {-1}
        for position in needed:
            self._add(position, tape[position])

    def _add(self, position: int, op: _Op) -> None:
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
        """What must still run for ``last`` to have run, in order."""
        found, stack = [], [last]
        while stack:
            position = stack.pop()
            if position not in self._taken:
                self._taken.add(position)
                found.append(position)
                stack.extend(self._after[position])
        return sorted(found)


def _schedule(tape: list[_Op], wanted: Collection[int]) -> list[_Step]:
    """Finishes each wanted storage right after the last draw it waits for, and frees whatever nothing reads again."""
    order = _Order(tape, _needed(tape, frozenset(wanted), draws=True))
    runs: list[tuple[int | None, int | None]] = []
    for storage in sorted(wanted, key=lambda each: (order.rank[order.writer[each]], order.writer[each])):
        runs += [(position, None) for position in order.take(order.writer[storage])]
        runs.append((None, storage))
    runs += [(position, None) for position in order.take(order.last_draw)]
    steps, live = [], frozenset[int]()
    for position, finished in reversed(runs):
        if position is None:
            assert finished is not None
            steps.append(_Step(None, finished, frozenset({finished}) - live))
            live |= {finished}
        else:
            op = tape[position]
            steps.append(_Step(position, None, (op.effects.reads | op.effects.writes) - live))
            live = live - op.effects.overwrites | op.effects.reads
    return steps[::-1]


class _Run:
    """Runs operations for real, on the storages that are real at the moment."""

    def __init__(self, record: "DeferredInit", copy: bool = False) -> None:
        self._record = record
        self._copy = copy  # real tensors from outside, so that they do not change
        self._real: dict[int, torch.UntypedStorage] = {}
        self._states: dict[int, Tensor] = {}
        moves = chain((op.moved for op in record.tape), (stream.final for stream in record.streams.values()))
        self._revisited = {move for move in moves if isinstance(move, int)}

    def tensor(self, ref: _Ref) -> Tensor:
        """The real tensor, of arbitrary values where nothing has been written."""
        if ref.storage == _NOWHERE:
            return torch.empty_strided(*ref.window[1:], dtype=ref.dtype, device=_META)
        if ref.storage not in self._real:
            storage = self._record.storages[ref.storage]
            real = self._empty(storage, self._record.homes.get(ref.storage, storage.device))
            self._real[ref.storage] = real
        return ref.on(self._real[ref.storage])

    def step(self, position: int) -> None:
        op = self._record.tape[position]
        args, kwargs = tree_map_only(_Ref, self.tensor, (op.args, op.kwargs))
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
        for storage in storages:
            self._real.pop(storage, None)

    def move(self, stream: _Stream, move: Tensor | int | None) -> None:
        if isinstance(move, int):
            move = stream.start if move < 0 else self._states[move]
        if move is not None:
            stream.generator.set_state(move)

    def _empty(self, storage: torch.UntypedStorage, home: torch.device) -> torch.UntypedStorage:
        if storage.device.type != "meta":
            return storage.clone() if self._copy else storage  # type: ignore[no-untyped-call]
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device=home).untyped_storage()

    @contextmanager
    def resumed(self, streams: Iterable[_Stream]) -> Iterator[None]:
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

    def _bind(self, ref: _Ref, result: Tensor) -> None:
        if _Ref.of(result).window == ref.window:
            self._real[ref.storage] = result.untyped_storage()
        else:  # a kernel that lays its result out unlike its meta twin
            self.tensor(ref).copy_(result)


class _AsReal(TorchFunctionMode):
    """Shows the code that builds the devices it asked for: on meta, ``nn.init`` would quietly do nothing."""

    def __init__(self, record: "DeferredInit") -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _GETTERS and self._record.owns(args[0]):
            home = self._record.homes[_key(args[0])]
            return home if _GETTERS[func] == "device" else _GETTERS[func] == f"is_{home.type}"
        if func in _READERS and self._record.owns(args[0]):
            args = (self._record.value(args[0], func.__name__), *args[1:])
        if kwargs.get("out") is not None:  # it is on meta, beside which no other device may be named
            kwargs.pop("device", None)
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        return func(*args, **self._placed(func, args, kwargs))

    def _placed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if func is Tensor.new_tensor and kwargs.get("device") is None and self._record.owns(args[0]):
            return {**kwargs, "device": self._record.homes[_key(args[0])]}
        return {**kwargs, "device": self._record.device} if str(kwargs.get("device")).startswith("meta") else kwargs


class DeferredInit(TorchDispatchMode):
    """Builds modules on the meta device and remembers how every tensor was made.

    Entered again, it goes on where it was left. The code under it sees the devices it asked for (``device`` where it
    named none, or meta) and, where it reads values that nothing random went into, those values.

    Args:
        device: where tensors are made unless they name another device, and where all are handed over.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.tape: list[_Op] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # held, so that no key comes twice
        self.homes: dict[int, torch.device] = {}  # deferred storage -> where an ordinary build has it
        self.streams: dict[torch.Generator, _Stream] = {}
        self._defaults: list[_Stream] = []
        self._open = ExitStack()
        self._paused = False

    @property
    def rng_state(self) -> list[Tensor]:
        """State of the default generators from which ``replay`` starts: give every rank that of rank 0."""
        return [stream.start for stream in self._defaults]

    @rng_state.setter
    def rng_state(self, states: list[Tensor]) -> None:
        for stream, state in zip(self._defaults, states, strict=True):
            stream.start = state

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on meta and got its values under this mode."""
        with torch._C.DisableTorchFunction():
            return tensor.is_meta and _key(tensor) in self.homes

    def value(self, tensor: Tensor, reader: str) -> Tensor:
        """Value of a tensor at this point of the build; an error if anything random went into it."""
        with self.pause():
            self.check_known(tensor, reader)
            ref = self._ref(tensor)
            needed = _needed(self.tape, frozenset({ref.storage}), draws=False)
            for op in (self.tape[position] for position in needed):
                if op.stream:
                    raise RuntimeError(
                        f"configure_model() reads a random value ({op.func}, read by {reader}) while it builds the "
                        "model, but values are drawn only after every rank has built it; draw that value with "
                        "Python's random, or create this part of the model in __init__"
                    )
            run = _Run(self, copy=bool(needed))
            for position in needed:
                run.step(position)
            return run.tensor(ref)

    def replay(self, wanted: Mapping[str, Tensor], sink: Sink) -> None:
        """Makes each wanted tensor as an ordinary build would have, and leaves the generators as it would have.

        Args:
            wanted: names -> tensors as they are after the build; several names may share a tensor or a storage.
            sink: called once per name with the whole tensor, which is freed afterwards unless the sink keeps it.

        Raises:
            RuntimeError: if a wanted tensor is on meta but got no values under this mode.
        """
        names = self._named(wanted)
        outside = {storage for op in self.tape for storage in op.effects.writes if storage not in self.homes}
        run = _Run(self)
        with torch.no_grad(), run.resumed(self.streams.values()):
            for step in _schedule(self.tape, outside.union(key for key in names if key is not None)):
                if step.position is not None:
                    run.step(step.position)
                for name, ref in names.get(step.finished, ()):
                    sink(name, run.tensor(ref).to(self.device))
                run.free(step.freed)

    def _named(self, wanted: Mapping[str, Tensor]) -> Mapping[int | None, list[tuple[str, _Ref]]]:
        names: defaultdict[int | None, list[tuple[str, _Ref]]] = defaultdict(list)
        written = set().union(*(op.effects.writes for op in self.tape if not _makes_no_values(op.func)))
        for name, tensor in wanted.items():
            self.check_known(tensor, repr(name))
            if tensor.numel() and self.owns(tensor) and _key(tensor) not in written:
                raise RuntimeError(
                    f"configure_model() made {name!r} but gave it no values, so ranks would differ; initialise it (it "
                    "costs nothing while the model is built), or load a pretrained model in __init__"
                )
            names[_key(tensor)].append((name, self._ref(tensor)))
        return names

    def __enter__(self) -> "DeferredInit":
        devices = (torch.device("cpu"), self.device)
        self._defaults = list(dict.fromkeys(self._stream(_default_generator(device)) for device in devices))
        for stream in self.streams.values():
            stream.open()
        with ExitStack() as stack:
            stack.enter_context(self.device)
            stack.enter_context(_AsReal(self))
            stack.enter_context(self._whole())
            super().__enter__()  # type: ignore[no-untyped-call]
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._open.close()
        for stream in self.streams.values():
            stream.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if func is aten.empty.memory_format and 0 in args[0] and "meta" not in str(kwargs.get("device")):
                return func(*args, **kwargs)  # into which torch.load hangs the storages that it reads
            if func is aten.lift_fresh.default and not args[0].is_meta and args[0].numel():
                return self._defer(aten.clone.default, args, {})
            if func.is_view or torch.Tag.inplace_view in func.tags:
                return func(*args, **kwargs)
            if torch.Tag.data_dependent_output in func.tags:
                return self._read(func, args, kwargs)
            return self._defer(func, args, kwargs)

    def _defer(self, func: Any, args: Any, kwargs: Any) -> Any:
        inputs = _tensors((args, kwargs))
        twins = {id(tensor): _twin(tensor) for tensor in inputs if not tensor.is_meta}
        meta_args, meta_kwargs = tree_map_only(Tensor, lambda each: twins.get(id(each), each), (args, kwargs))
        try:
            out = func(*meta_args, **_meta_options(func, meta_args, meta_kwargs))
        except NotImplementedError:  # no meta kernel, as where the shape of the result depends on values
            if func._schema.is_mutable or _is_random(func):
                raise
            out = tree_map_only(Tensor, _twin, self._read(func, args, kwargs))
        originals = {id(twins[id(each)]): each for each in inputs if id(each) in twins}
        out = tree_map_only(Tensor, lambda each: originals.get(id(each), each), out)
        self._record(func, args, kwargs, out)
        return out

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda each: self.value(each, str(func)), (args, kwargs))
        with self.pause():
            return func(*args, **kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        home, effects = self._home(args, kwargs), _Effects.of(func, args, kwargs)
        if _reads_only_shape(func) or kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": home}
        for tensor in _tensors((args, kwargs)):
            if _key(tensor) in effects.reads or _key(tensor) in effects.writes - effects.overwrites:
                self.check_known(tensor, str(func))
        refs = tree_map_only(Tensor, _Ref.of_shape if _reads_only_shape(func) else self._ref, (args, kwargs))
        self.homes |= {key: home for key in effects.overwrites if self.storages[key].device.type == "meta"}
        made = [self._made(leaf, home) for leaf in tree_leaves(out)]
        effects = effects.and_makes({ref.storage for ref in made if ref})
        stream = self._stream(kwargs.get("generator") or _default_generator(home)) if _is_random(func) else None
        if effects.writes or stream:
            moved = stream.moved() if stream else None
            self.tape.append(_Op(func, refs[0], refs[1], made, effects, torch.get_default_dtype(), stream, moved))
        if stream:
            stream.mark(len(self.tape) - 1)

    def _made(self, leaf: Any, home: torch.device) -> _Ref | None:
        if not isinstance(leaf, Tensor) or _key(leaf) in self.storages:
            return None
        ref = self._ref(leaf)
        self.homes[ref.storage] = home
        return ref

    def _ref(self, tensor: Tensor) -> _Ref:
        ref = _Ref.of(tensor)
        self.storages.setdefault(ref.storage, tensor.untyped_storage())
        return ref

    def _home(self, args: Any, kwargs: Any) -> torch.device:
        """Where an ordinary build makes the result; what asked for meta was to become real on our device."""
        if kwargs.get("device") is not None:
            asked = torch.device(kwargs["device"])
            return self.device if asked.type == "meta" else asked
        inputs = sorted(_tensors((args, kwargs)), key=lambda each: each.dim() == 0)  # a number follows the others
        homes = [self.homes.get(_key(each), each.device) for each in inputs]
        return next((self.device if home.type == "meta" else home for home in homes), torch.device("cpu"))

    def _stream(self, generator: torch.Generator) -> _Stream:
        if generator not in self.streams:
            self.streams[generator] = _Stream(generator)
        return self.streams[generator]

    def check_known(self, tensor: Tensor, reader: str) -> None:
        """Refuse a meta tensor whose values nobody recorded."""
        if tensor.is_meta and not self.owns(tensor):
            raise RuntimeError(
                f"{reader} needs a tensor of shape {tuple(tensor.shape)} that is on meta but was not made while "
                "configure_model() was recorded, so that its values are unknown; make it in configure_model(), or give "
                "it values there first"
            )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Operations inside run as they are."""
        paused, dtype, self._paused = self._paused, torch.get_default_dtype(), True
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                yield
        finally:
            self._paused = paused
            torch.set_default_dtype(dtype)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        initialise = getattr(nn.init, _WHOLE, None)

        def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with self.pause():
                self._record(initialise, (tensor, *args), kwargs, tensor)
            return tensor

        if initialise is not None:
            setattr(nn.init, _WHOLE, record)
        try:
            yield
        finally:
            if initialise is not None:
                setattr(nn.init, _WHOLE, initialise)


class _Writes(TorchDispatchMode):
    """Notes which storages are written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.storages.update(map(_key, _written(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


class _Slot(NamedTuple):
    """A place in which a module holds a tensor."""

    name: str
    owner: nn.Module
    table: dict[str, Any]
    key: str
    meta: Tensor

    def swap(self, tensor: Tensor | None) -> Tensor | None:
        before: Tensor | None = self.table.get(self.key)
        self.table[self.key] = tensor
        return before


class OrphanModules:
    """Modules with meta tensors that no build recorded; ``reset_parameters()`` makes them, one module at a time.

    A module that holds such tensors itself is made together with its submodules, these first, for it may have the
    last word on theirs (as ``nn.MultiheadAttention`` has).

    Args:
        module: the model, whole and not yet sharded.
        names: parameters and buffers of it that are to be made.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        slots = [slot for slot in _slots(module) if slot.name in names]
        self._names: defaultdict[int, list[str]] = defaultdict(list)
        for slot in slots:
            self._names[id(slot.meta)].append(slot.name)
        self._units = [
            (order, [slot for slot in slots if slot.owner in order])
            for order in _units(module, {slot.owner for slot in slots})
        ]

    @torch.no_grad()
    def reset(self, device: torch.device, sink: Sink) -> None:
        """Makes the tensors on ``device``. The modules meanwhile may hold shards, and keep what they hold.

        Args:
            device: where the tensors are made.
            sink: called once per name with the whole tensor, which is freed afterwards unless the sink keeps it.

        Raises:
            TypeError: if a module leaves one of its tensors without a value.
        """
        made: set[int] = set()
        for modules, slots in self._units:
            for slot, tensor in _reset(modules, slots, device):
                names = [] if id(slot.meta) in made else self._names[id(slot.meta)]
                made.add(id(slot.meta))
                for name in names:
                    sink(name, tensor)


def _reset(modules: list[nn.Module], slots: list[_Slot], device: torch.device) -> list[tuple[_Slot, Tensor]]:
    empty = {id(slot.meta): _empty(slot.meta, device) for slot in slots}
    before = [slot.swap(empty[id(slot.meta)]) for slot in slots]
    try:
        with _Writes() as writes:
            for module in modules:
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if reset is not None:
                    reset()
    finally:
        after = [slot.swap(tensor) for slot, tensor in zip(slots, before, strict=True)]
    unset = set(map(_key, empty.values())) - writes.storages
    for slot, tensor in zip(slots, after, strict=True):
        if tensor is None or _key(tensor) in unset:
            raise _no_value(slot)
    return [(slot, tensor.detach()) for slot, tensor in zip(slots, after, strict=True) if tensor is not None]


def _empty(meta: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty_like(meta, device=device)
    return nn.Parameter(tensor, meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor


def _no_value(slot: _Slot) -> TypeError:
    owner = slot.name.rpartition(".")[0] or "the model itself"
    return TypeError(
        f"{slot.name!r} is on meta, and {owner} ({type(slot.owner).__name__}) has no reset_parameters() that sets it; "
        "give it one that sets every parameter and buffer it holds, or build it in configure_model()"
    )


def _slots(module: nn.Module) -> Iterator[_Slot]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for table in (owner._parameters, owner._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield _Slot(f"{prefix}.{key}" if prefix else key, owner, table, key, tensor)


def _units(module: nn.Module, owners: set[nn.Module]) -> Iterator[list[nn.Module]]:
    if module in owners:
        yield list(_children_first(module))
    else:
        for child in module.children():
            yield from _units(child, owners)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module
