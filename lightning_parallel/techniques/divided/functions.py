"""User code in a step that `__torch_function__` does not see: autograd Functions, and functions that the user compiled.

A `torch.autograd.Function` would take a `Divided` tensor for one without autograd history, and lose its gradient. It
gets full tensors with their history instead. What the user compiled by `torch.compile` runs eagerly. TorchScript and
transforms of `torch.func` reach `Divided` tensors below autograd: `Wrapper.__torch_dispatch__` passes full tensors to
them, or raises where a gradient would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.techniques.divided.step_parameters import Part, computing
from lightning_parallel.techniques.divided.tensor import Divided, View, is_divided, local_part, to_full_tensors
from lightning_parallel.techniques.tools.redirect import Pass, intercept_backward

PLAIN = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None)))
"""Types of arguments that are neither `Divided` tensors nor callables."""


OWN = ("lightning_parallel.", "torch.distributed.tensor.", "torch.distributed._functional_collectives")
"""Modules whose autograd Functions communicate between ranks, and so take and return local shards."""


class FunctionsGetFullTensors:
    """Context in which autograd Functions get full tensors, and functions that the user compiled run eagerly.

    `torch.autograd.backward` gets the leaves of `Divided` inputs, as the wrappers are not in the graph. After in-place
    changes, autograd replays views by the operations that created them, as for tensors without strides: replayed
    by strides, a view of which this rank has no element could not be differentiated twice, and other ranks would wait
    for this rank in backward.
    """

    _depth: ClassVar[int] = 0
    _within: ClassVar[ExitStack]
    _stance: ClassVar[str]

    def __enter__(self) -> None:
        cls = FunctionsGetFullTensors
        if not cls._depth:
            with ExitStack() as entered:  # leaves again what it has entered if something raises
                # Function.apply looks up `apply` of this base class at each call; it has none of its own, only its C
                # base has. So code that took `apply` earlier, as in `norm = MyNorm.apply`, comes through here, too.
                _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
                entered.callback(delattr, _SingleLevelFunction, "apply")
                stance: Any = torch.compiler.set_stance("force_eager")
                cls._stance = stance.prev.stance
                entered.enter_context(stance)
                entered.enter_context(_force_original_view_tracking(True))
                entered.enter_context(intercept_backward(_to_leaves))
                cls._within = entered.pop_all()
        cls._depth += 1

    def __exit__(self, *_: object) -> None:
        cls = FunctionsGetFullTensors
        cls._depth -= 1
        if not cls._depth:
            cls._within.close()

    @classmethod
    def compiling(cls) -> AbstractContextManager[Any]:
        """Return a context for the call of a compiled block, which gets plain tensors: inside, it runs compiled."""
        stance: AbstractContextManager[Any] = torch.compiler.set_stance(cls._stance) if cls._depth else nullcontext()
        return stance

    @classmethod
    @contextmanager
    def blocks(cls, stance: str) -> Iterator[None]:
        """Return a context in which compiled blocks run under this stance of the compiler."""
        if not cls._depth:
            with torch.compiler.set_stance(stance):
                yield
            return
        before, cls._stance = cls._stance, stance
        try:
            yield
        finally:
            cls._stance = before


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an autograd Function on full tensors; its in-place changes reach the `Divided` tensors."""
    below: Any = super(_SingleLevelFunction, cls)
    if cls.__name__ == "RegisterPostBackwardFunction":  # of `fully_shard`: returns the inputs of a block
        group, *inputs = map(computing, args)
        outputs = below.apply(group, *map(local_part, inputs))
        pairs = zip(inputs, outputs, strict=True)
        return tuple(Divided(own, each.cuts) if is_divided(each) else own for each, own in pairs)
    if cls.__module__.startswith(OWN) or PLAIN.issuperset(map(type, args)):
        return below.apply(*args, **kwargs)
    arguments = list(map(computing, args))
    full_args: list[tuple[Any, Tensor, int]] = []  # (`Divided` tensor, its full tensor, version)
    for index, argument in enumerate(arguments):
        if is_divided(argument):
            whole = arguments[index] = argument.whole(cls.__name__)
            full_args.append((argument, whole, 0 if whole.is_inference() else whole._version))
        elif callable(argument) and not isinstance(argument, (type, ReturnsFullTensors)):
            arguments[index] = ReturnsFullTensors(argument)
    result = below.apply(*arguments, **kwargs)
    for divided, whole, version in full_args:
        if not whole.is_inference() and whole._version != version:
            # Write back what the function changed in its full tensor; `write_back_changes` does so for later changes.
            view = View(whole, divided, divided.own, (-1, divided.own._version))
            view.write_back_views()
            divided.only.ranks.viewed.append(view)
    return result


class ReturnsFullTensors:
    """Callable argument of an autograd Function, such as the layer of a reentrant checkpoint; it returns full tensors.

    Rules apply inside the callable: in the forward of the Function, and in its backward, where a checkpoint recomputes.

    Args:
        called: a function or a module.
    """

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        with _set_fwd_grad_enabled(True):  # `in_function` reads this flag
            result = self._called(*args, **kwargs)
        return to_full_tensors(result, "a torch.autograd.Function")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._called, name)


def _to_leaves(backward: Callable[..., None], given: Pass) -> None:
    """Run `torch.autograd.backward` with the leaves of `Divided` inputs.

    Raises:
        RuntimeError: `create_graph=True` for gradients of parameters, some of which are summed only when the step ends.
    """
    only_plain_inputs = given.inputs is not None and not any(
        isinstance(each, (Divided, nn.Parameter)) for each in tree_leaves(given.inputs)
    )
    if given.create_graph and not only_plain_inputs:
        raise RuntimeError(
            "backward(create_graph=True) gets partial gradients of parameters, as ranks sum some when the step ends; "
            "use torch.autograd.grad(loss, parameters, create_graph=True), whose results are full and have a graph"
        )
    backward(*given._replace(inputs=tree_map_only((Divided, Part), lambda each: computing(each).own, given.inputs)))
