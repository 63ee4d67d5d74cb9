"""Tensors of pipeline stages for user code between steps, which computes with them on every rank as on one device.

Every rank runs the same hooks and helpers. An operation on a parameter of a stage runs on the ranks that hold it; other
ranks run it on meta and get a tensor of the same shape without memory. If Python needs a value, or if a value is
written to a tensor that every rank has, the first holder broadcasts it over the pipeline's process group. All ranks run
the operation on meta first, which decides whether a value is needed, so they always agree on the messages. Reading one
number is one small message.

    >>> layer.weight.norm().item()  # of stage 1: computed there, broadcast to all ranks of the pipeline
    3.2
    >>> layer.weight.mul_(0.9)  # of stage 1: changed there, no message
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from lightning_parallel.collectives.point_to_point import broadcast_object
from lightning_parallel.techniques.tools.absent import is_in_place
from lightning_parallel.techniques.tools.global_shard import METADATA_OPS, RANDOM, VIEWS, as_global_shard
from lightning_parallel.techniques.tools.shards import full_tensor_of

STRUCTURE = METADATA_OPS - {"detach", "grad", "backward", "to_local", "redistribute", "is_pinned"}
"""Methods that need no values: each rank calls them on its local tensor."""

DRAWS = RANDOM | {"normal", "bernoulli", "multinomial", "poisson", "dropout", "trunc_normal_"}
"""Operations that draw random numbers: other ranks draw as many as holders, so that generators stay the same."""


class ValueInStepError(RuntimeError):
    """Raised when a step uses a staged tensor, which user code has kept from between steps."""


@dataclass(eq=False)
class StageRanks:
    """The ranks of one pipeline, one of each stage, which exchange values between steps."""

    group: dist.ProcessGroup  # one rank of every stage
    device: torch.device  # of tensors on this rank
    rank: int  # this rank in `group`
    exposed: bool = True  # whether user code runs between steps: the same code on all ranks
    tensors: list[Tensor] = field(default_factory=list)  # staged tensors of the model, in the same order on all ranks
    knows_gradients: bool = True  # whether all ranks know which of `tensors` have gradients
    # gradients on this rank that were read since the last step; parameters may have other gradients by now
    gradients: list[Tensor] = field(default_factory=list)
    _homes: dict[tuple[int, ...], Home] = field(default_factory=dict)  # by holders

    def home(self, holders: Sequence[int]) -> Home:
        """Return the `Home` of tensors that these ranks of the pipeline hold: several ranks if stages share them."""
        key = tuple(sorted(holders))
        return self._homes.setdefault(key, Home(self, key))

    def agree_on_gradients(self) -> None:
        """Give parameters of other stages hollow gradients if their holders have gradients. Collective over `group`."""
        if self.knows_gradients:
            return
        self.knows_gradients = True
        parameters = {id(tensor): tensor for tensor in self.tensors if isinstance(tensor, nn.Parameter)}.values()
        with torch._C.DisableTorchFunctionSubclass():  # the gradients that this rank has
            staged = [(p, type(p).home, p.grad) for p in parameters if isinstance(p, Staged)]
        flags = [home.holders[0] == self.rank and gradient is not None for _, home, gradient in staged]
        present = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(present, group=self.group)  # [staged parameters]: 1 from the first holder, or 0
        for (parameter, home, _), has_one in zip(staged, present.tolist(), strict=True):
            if not home.here:
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = hollow(parameter, parameter.device) if has_one else None


@dataclass(eq=False)
class Home:
    """The ranks of a pipeline that hold certain tensors."""

    ranks: StageRanks
    holders: tuple[int, ...]  # ranks in `ranks.group`
    kinds: dict[type[Tensor], type[Staged]] = field(
        default_factory=dict
    )  # class of a tensor on its holders -> class of the staged tensor

    @property
    def here(self) -> bool:
        """Whether this rank is a holder."""
        return self.ranks.rank in self.holders

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first holder, tensors on the same device type. Collective over `ranks.group`."""
        device = self.ranks.device
        sent = pytree.tree_map_only(Tensor, lambda t: _OnHost(t.cpu(), t.device.type == device.type), value)
        received = broadcast_object(sent, self.holders[0], self.ranks.group, device)
        return pytree.tree_map_only(_OnHost, lambda t: t.tensor.to(device) if t.on_device else t.tensor, received)


@dataclass
class _OnHost:
    tensor: Tensor  # a copy on the host, to be pickled
    on_device: bool  # whether the original is on the device of its rank


class Staged(Tensor):
    """Tensor of one stage: real on the ranks that hold it, `hollow` on the others. See the module's docstring.

    `stage` and `unstage` change the class of a tensor in place, so that it stays the same object.
    """

    home: ClassVar[Home]
    held: ClassVar[type[Tensor]]  # the class of the tensor in a step

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Staged(stages={type(self).home.holders}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        kind = type(self)
        with _as_held([self]):
            if kind.home.here and kind.held not in (Tensor, nn.Parameter):
                copied = self.__deepcopy__(memo)
            else:  # torch's deepcopy refuses tensors with a history, this copies them
                copied = self.detach().clone() if kind.home.here else hollow(self, self.device)
                copied = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = copied
        return stage(copied, kind.home)

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = full(self)
        return (nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value).__reduce_ex__(
            protocol
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.Tensor`. Collective over the pipeline's ranks if a value is needed."""
        kwargs, name = kwargs or {}, func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            return _attribute(func, name, args)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        staged = [leaf for leaf in leaves if isinstance(leaf, Staged)]
        if name in STRUCTURE or not staged:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        homes = {type(each).home for each in staged}
        home = next(iter(homes))
        if not home.ranks.exposed:
            raise ValueInStepError(
                f"{name} was called in a step on {staged[0]!r}, which was obtained between the steps of a pipeline, "
                "where every rank runs the same code; in a step use the module's own parameters, or read the value "
                "between steps, as in on_train_batch_start"
            )
        if name in ("backward", "grad"):
            home.ranks.knows_gradients = False
        written = kwargs.get("out")  # or the first argument, if the name is that of an in-place operation
        if written is None and args and is_in_place(name):
            written = args[0]
        if isinstance(written, Staged) and len(homes) > 1:  # other stages send their values to its stage
            home = type(written).home
            leaves = [
                full(leaf) if isinstance(leaf, Staged) and type(leaf).home is not home else leaf for leaf in leaves
            ]
        elif name.startswith("_foreach_") and (len(homes) > 1 or _any_plain(args[0])):
            # tensors of several stages, or plain ones too: run the operation for single tensors on each
            count, single = len(args[0]), name.removeprefix("_foreach_")
            rows = [
                [a[k] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args] for k in range(count)
            ]
            if single == "norm":
                kwargs = {key: value for key, value in kwargs.items() if key == "p"}
            return [getattr(torch.Tensor, single)(*row, **kwargs) for row in rows]
        elif len(homes) > 1 or _any_plain(written):
            args, kwargs = pytree.tree_unflatten([full(leaf) for leaf in leaves], tree)
            return func(*args, **kwargs)
        return _Call(func, name, leaves, tree, home, written if isinstance(written, Staged) else None).run()


def hollow(like: Tensor, device: torch.device) -> Tensor:
    """Return a tensor with shape, strides, dtype and device, but no memory: no operation may compute with it."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        tensor.untyped_storage().resize_(0)
        return tensor


def stage(tensor: Tensor, home: Home) -> Staged:
    """Make a tensor staged, in place; on ranks that do not hold it, it must be `hollow`."""
    if not isinstance(tensor, Staged):
        held = type(as_global_shard(tensor) if type(tensor) is DTensor else tensor)
        if held not in home.kinds:
            members = {"home": home, "held": held, "__slots__": ()}
            home.kinds[held] = type(f"Staged{held.__name__}", (Staged, held), members)
        tensor.__class__ = home.kinds[held]
    return cast(Staged, tensor)


def unstage(tensor: Tensor) -> Tensor:
    """Give a staged tensor, in place, the class that it has in a step.

    Raises:
        Exception: an operation that wrote to the tensor raised this on this rank, and no value was read since.
    """
    if isinstance(tensor, Staged):
        tensor.__class__ = type(tensor).held  # type: ignore[assignment]
    failure = vars(tensor).pop("_failure", None)
    if failure is not None:
        raise failure
    return tensor


def full(tensor: Any) -> Any:
    """Return the value of a staged tensor on all ranks of the pipeline (collective); anything else unchanged."""
    if not isinstance(tensor, Staged):
        return tensor
    return _Call(_whole, "full", [tensor], None, type(tensor).home, None).read()


def _whole(tensor: Tensor) -> Tensor:
    return full_tensor_of(tensor.detach())


@contextmanager
def _as_held(tensors: Sequence[Any]) -> Iterator[None]:
    """Context manager: staged tensors have the class inside that they have in a step."""
    kinds = [(tensor, type(tensor)) for tensor in tensors if isinstance(tensor, Staged)]
    for tensor, kind in kinds:
        tensor.__class__ = kind.held  # type: ignore[assignment]
    try:
        yield
    finally:
        for tensor, kind in kinds:
            tensor.__class__ = kind


def _any_plain(written: Any) -> bool:
    tensors = [each for each in pytree.tree_leaves(written) if isinstance(each, Tensor)]
    return any(not isinstance(each, Staged) for each in tensors)


@dataclass
class _Call:
    """Call of a torch function on staged tensors of one home, and on tensors that every rank has."""

    func: Callable[..., Any]
    name: str
    leaves: list[Any]  # the flat arguments
    tree: Any
    home: Home
    written: Staged | None  # the tensor that the call changes in place, if that is staged
    metas: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # id -> argument, the same on meta

    def run(self) -> Any:
        """Run the call, as the module's docstring says. Collective over the pipeline's ranks if a value is needed."""
        with torch._C.DisableTorchFunctionSubclass():
            try:  # the same on all ranks
                shape = self._called(self._on_meta)
                numbers = (int, float, complex, str)  # values that Python code gets
                needs_value = type(shape).__module__ == "numpy" or any(
                    isinstance(leaf, numbers) for leaf in pytree.tree_leaves(shape)
                )
            except Exception:  # no meta kernel, shapes depend on values, or the call is wrong: run it on holders
                shape, needs_value = None, True
        draws = self.name in DRAWS or getattr(self.func, "__module__", "") == "torch.nn.init"
        if draws and not self.home.here:
            self._called(self._filled)
        if needs_value:
            return self.read()
        result = self._at_home(shape) if self.home.here else shape
        if not self.home.here and self.written is not None and id(self.written) in self.metas:
            changed = self.metas[id(self.written)][1]
            if (changed.shape, changed.stride()) != (self.written.shape, self.written.stride()):  # e.g. t_
                with torch._C.DisableTorchFunctionSubclass():
                    self.written.data = hollow(changed, self.written.device)
        originals = {id(meta): leaf for leaf, meta in self.metas.values()} | {
            id(leaf): leaf for leaf in self.leaves if isinstance(leaf, Tensor)
        }
        return pytree.tree_map_only(Tensor, lambda made: self._returned(made, originals), result)

    def read(self) -> Any:
        """Return the full result on all ranks; raise on all what it raised on the first holder. Collective."""
        result: Any = None
        failure: Exception | None = self._failure() if self.home.here else None
        if self.home.here and failure is None:
            try:
                with _as_held(self.leaves):
                    local = self.func(self.leaves[0]) if self.tree is None else self._called()
                    result = pytree.tree_map_only(Tensor, lambda value: _whole(value).clone(), local)
            except Exception as error:
                failure = error
        result, failure = self.home.broadcast((result, failure))
        if failure is not None:
            raise failure
        return result

    def _at_home(self, shape: Any) -> Any:
        """Return the result on a holder. An error is stored until the next read of a value, when all ranks raise it."""
        failure = self._failure()
        if failure is None:
            try:
                with _as_held(self.leaves):
                    return self._called()
            except Exception as error:
                failure = error
        if self.written is not None:
            vars(self.written)["_failure"] = failure

        def failed(meta: Tensor) -> Tensor:
            vars(meta)["_failure"] = failure
            return meta

        return pytree.tree_map_only(Tensor, failed, shape)

    def _failure(self) -> Exception | None:
        """Return the error stored in an argument, which an earlier call raised."""
        failures = (vars(leaf).get("_failure") for leaf in self.leaves if isinstance(leaf, Staged))
        return next((failure for failure in failures if failure is not None), None)

    def _called(self, change: Callable[[Any], Any] | None = None) -> Any:
        """Call the function, with `change` applied to each argument."""
        leaves = self.leaves if change is None else [change(leaf) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return self.func(*args, **kwargs)

    def _on_meta(self, leaf: Any) -> Any:
        """Return an argument on meta; the device of the stage becomes meta, too."""
        if isinstance(leaf, torch.device) and leaf.type == self.home.ranks.device.type:
            return torch.device("meta")
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self.metas:
            meta = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            if torch.is_grad_enabled():  # else even the query may raise, for a view on a holder that was written to
                meta.requires_grad_(leaf.requires_grad)
                meta = meta if leaf.is_leaf else meta.clone()
            self.metas[id(leaf)] = leaf, meta
        return self.metas[id(leaf)][1]

    def _filled(self, leaf: Any) -> Any:
        """Return an argument; a tensor of another stage with made-up values, to draw as many numbers as there."""
        if not isinstance(leaf, Staged):
            return leaf
        with torch._C.DisableTorchFunctionSubclass():
            return torch.full(leaf.shape, 0.5, dtype=leaf.dtype, device=self.home.ranks.device)

    def _returned(self, made: Tensor, given: dict[int, Tensor]) -> Tensor:
        """Return a result as a staged tensor, or the argument that it is; `given`: id of an argument -> original."""
        if self.written is not None and made.shape == self.written.shape:
            return self.written
        original = given.get(id(made))
        if isinstance(original, Staged):
            return original
        if made.is_meta:
            requires_grad, failure = made.requires_grad, vars(made).get("_failure")
            made = hollow(made, self.home.ranks.device).requires_grad_(requires_grad)
            if failure is not None:
                vars(made)["_failure"] = failure
        return stage(made, self.home)


def _attribute(func: Any, name: str, args: Any) -> Any:
    """Get, set or delete an attribute of a staged tensor. Collective over the pipeline's ranks for `grad`."""
    attribute = getattr(func.__self__, "__name__", "")
    tensor = cast(Staged, args[0])
    if not isinstance(tensor, Staged):  # a plain tensor gets a staged value
        return func(tensor, *map(full, args[1:]))
    home = type(tensor).home
    if attribute == "grad":
        if not home.ranks.exposed:  # in a step: a parameter of another stage, which has no gradient there
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        home.ranks.agree_on_gradients()
    if name == "__set__" and attribute in ("data", "grad") and isinstance(args[1], Tensor):
        return _set_tensor(func, attribute, tensor, args[1])
    if name == "__get__" and attribute in VIEWS and not home.here:
        with torch._C.DisableTorchFunctionSubclass():
            result = hollow(func(torch.empty_like(tensor, device="meta")), tensor.device)
    else:
        with _as_held([tensor]):
            result = func(*args)
    if not isinstance(result, Tensor):
        return result
    if attribute == "grad" and home.here:
        home.ranks.gradients.append(result)
    return stage(result, home)


def _set_tensor(func: Any, attribute: str, tensor: Staged, value: Tensor) -> None:
    """Set `data` or `grad` of a staged tensor. Collective if `value` is of another stage."""
    home = type(tensor).home
    if isinstance(value, Staged) and type(value).home is not home:
        value = full(value)
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise RuntimeError(
            f".{attribute} is set to a tensor of shape {tuple(value.shape)} and {value.dtype}, but a parameter in a "
            f"pipeline keeps its shape {tuple(tensor.shape)} and {tensor.dtype}; make another parameter in "
            "configure_model"
        )
    if attribute == "data":
        tensor.detach().copy_(value)
        return
    if not isinstance(value, Staged) and not home.here:
        value = hollow(value, value.device)
    with _as_held([tensor, value]):
        func(tensor, value)
