"""Builds a model without memory for it, and makes its tensors later, one at a time, as one process would have.

While a ``DeferredInit`` is active every tensor is made on meta and every operation is remembered. ``replay`` runs those
that matter, every draw among them and in its place, so that each weight is finished, handed over and freed early.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.strategies.build.orphan_modules import PRETRAINED
from lightning_parallel.strategies.build.tape import (
    GETTERS,
    READERS,
    RECORDED_WHOLE,
    Effects,
    Op,
    Ref,
    Replay,
    Sink,
    Stream,
    default_generator,
    is_random,
    makes_no_values,
    meta_options,
    meta_twin,
    needed_by,
    reads_only_shape,
    storage_key,
    tensors_in,
    turns_of,
)

aten = torch.ops.aten


class _AsReal(TorchFunctionMode):
    """Shows the code that builds the devices it asked for: on meta, ``nn.init`` would quietly do nothing."""

    def __init__(self, record: "DeferredInit") -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in GETTERS and self._record.owns(args[0]):
            home = self._record.homes[storage_key(args[0])]
            return home if GETTERS[func] == "device" else GETTERS[func] == f"is_{home.type}"
        if func == Tensor.data.__set__ and args[0].is_meta != args[1].is_meta:  # type: ignore[attr-defined]
            raise RuntimeError(f"configure_model() gives recorded values to a parameter that was read; {PRETRAINED}")
        if func in READERS and self._record.owns(args[0]):
            args = (self._record.value(args[0], func.__name__), *args[1:])
        if kwargs.get("out") is not None:  # it is on meta, beside which no other device may be named
            kwargs.pop("device", None)
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        return func(*args, **self._placed(func, args, kwargs))

    def _placed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if func is Tensor.new_tensor and kwargs.get("device") is None and self._record.owns(args[0]):
            return {**kwargs, "device": self._record.homes[storage_key(args[0])]}
        return {**kwargs, "device": self._record.device} if str(kwargs.get("device")).startswith("meta") else kwargs


class Conversions(TorchDispatchMode):
    """Records what is done to recorded tensors after the build, as a conversion to the precision of the trainer."""

    def __init__(self, record: "DeferredInit") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(self._record.owns, tensors_in((args, kwargs)))):
            return self._record.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


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
        self.tape: list[Op] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # held, so that no key comes twice
        self.homes: dict[int, torch.device] = {}  # deferred storage -> where an ordinary build has it
        self.streams: dict[torch.Generator, Stream] = {}
        self._defaults: list[Stream] = []
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
            return tensor.is_meta and storage_key(tensor) in self.homes

    def value(self, tensor: Tensor, reader: str) -> Tensor:
        """Value of a tensor at this point of the build; an error if anything random went into it."""
        with self.pause():
            self.check_known(tensor, reader)
            ref = self._ref(tensor)
            needed = needed_by(self.tape, frozenset({ref.storage}), draws=False)
            for op in (self.tape[position] for position in needed):
                if op.stream:
                    raise RuntimeError(
                        f"configure_model() reads a random value ({op.func}, read by {reader}) while it builds the "
                        "model, but values are drawn only after every rank has built it; draw that value with "
                        "Python's random, or create this part of the model in __init__"
                    )
            run = Replay(self, copy=bool(needed))
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
        run = Replay(self)
        with torch.no_grad(), run.resumed(self.streams.values()):
            for step in turns_of(self.tape, outside.union(key for key in names if key is not None)):
                if step.position is not None:
                    run.step(step.position)
                for name, ref in names.get(step.finished, ()):
                    sink(name, run.tensor(ref).to(self.device))
                run.free(step.freed)

    def _named(self, wanted: Mapping[str, Tensor]) -> Mapping[int | None, list[tuple[str, Ref]]]:
        names: defaultdict[int | None, list[tuple[str, Ref]]] = defaultdict(list)
        written = self._written()
        for name, tensor in wanted.items():
            self.check_known(tensor, repr(name))
            if tensor.numel() and self.owns(tensor) and storage_key(tensor) not in written:
                raise RuntimeError(
                    f"configure_model() made {name!r} but gave it no values, so ranks would differ; initialise it (it "
                    f"costs nothing while the model is built); {PRETRAINED}"
                )
            names[storage_key(tensor)].append((name, self._ref(tensor)))
        return names

    def _written(self) -> set[int]:
        """The storages that were given values: not those that were only allocated, nor conversions of such."""
        written = set[int]()
        for op in self.tape:
            of_nothing = op.func is aten._to_copy.default and (op.effects.reads & self.homes.keys()) - written
            if not of_nothing and not makes_no_values(op.func):
                written |= op.effects.writes
        return written

    def __enter__(self) -> "DeferredInit":
        devices = (torch.device("cpu"), self.device)
        self._defaults = list(dict.fromkeys(self._stream(default_generator(device)) for device in devices))
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
        inputs = tensors_in((args, kwargs))
        twins = {id(tensor): meta_twin(tensor) for tensor in inputs if not tensor.is_meta}
        meta_args, meta_kwargs = tree_map_only(Tensor, lambda each: twins.get(id(each), each), (args, kwargs))
        try:
            out = func(*meta_args, **meta_options(func, meta_args, meta_kwargs))
        except NotImplementedError:  # no meta kernel, as where the shape of the result depends on values
            if func._schema.is_mutable or is_random(func):
                raise
            out = tree_map_only(Tensor, meta_twin, self._read(func, args, kwargs))
        originals = {id(twins[id(each)]): each for each in inputs if id(each) in twins}
        out = tree_map_only(Tensor, lambda each: originals.get(id(each), each), out)
        self._record(func, args, kwargs, out)
        return out

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, lambda each: self.value(each, str(func)), (args, kwargs))
        with self.pause():
            return func(*args, **kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        home, effects = self._home(args, kwargs), Effects.of(func, args, kwargs)
        if reads_only_shape(func) or kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": home}
        for tensor in tensors_in((args, kwargs)):
            if storage_key(tensor) in effects.reads or storage_key(tensor) in effects.writes - effects.overwrites:
                self.check_known(tensor, str(func))
        refs = tree_map_only(Tensor, Ref.of_shape if reads_only_shape(func) else self._ref, (args, kwargs))
        self.homes |= {key: home for key in effects.overwrites if self.storages[key].device.type == "meta"}
        made = [self._made(leaf, home) for leaf in tree_leaves(out)]
        effects = effects.and_makes({ref.storage for ref in made if ref})
        stream = self._stream(kwargs.get("generator") or default_generator(home)) if is_random(func) else None
        if effects.writes or stream:
            moved = stream.moved() if stream else None
            self.tape.append(Op(func, refs[0], refs[1], made, effects, torch.get_default_dtype(), stream, moved))
        if stream:
            stream.mark(len(self.tape) - 1)

    def _made(self, leaf: Any, home: torch.device) -> Ref | None:
        if not isinstance(leaf, Tensor) or storage_key(leaf) in self.storages:
            return None
        ref = self._ref(leaf)
        self.homes[ref.storage] = home
        return ref

    def _ref(self, tensor: Tensor) -> Ref:
        ref = Ref.of(tensor)
        self.storages.setdefault(ref.storage, tensor.untyped_storage())
        return ref

    def _home(self, args: Any, kwargs: Any) -> torch.device:
        """The device on which an ordinary build makes the result; what asked for meta was to become real on ours."""
        if kwargs.get("device") is not None:
            asked = torch.device(kwargs["device"])
            return self.device if asked.type == "meta" else asked
        inputs = sorted(tensors_in((args, kwargs)), key=lambda each: each.dim() == 0)  # a number follows the others
        homes = [self.homes.get(storage_key(each), each.device) for each in inputs]
        return next((self.device if home.type == "meta" else home for home in homes), torch.device("cpu"))

    def _stream(self, generator: torch.Generator) -> Stream:
        if generator not in self.streams:
            self.streams[generator] = Stream(generator)
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
        initialise = getattr(nn.init, RECORDED_WHOLE, None)

        def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            with self.pause():
                self._record(initialise, (tensor, *args), kwargs, tensor)
            return tensor

        if initialise is not None:
            setattr(nn.init, RECORDED_WHOLE, record)
        try:
            yield
        finally:
            if initialise is not None:
                setattr(nn.init, RECORDED_WHOLE, initialise)
