"""User code in a step that `__torch_function__` does not see: functions of autograd, and what the user compiled.

A `torch.autograd.Function` would take a divided tensor for one without history, and its gradient would be lost. Such a
function gets whole tensors, with their history. What the user compiled by `torch.compile` runs eagerly. TorchScript and
transforms of `torch.func` reach divided tensors below autograd: `Wrapper.__torch_dispatch__` gives them wholes, or
raises where a gradient would be lost.
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

from lightning_parallel.techniques.divided.parts import Part, computing
from lightning_parallel.techniques.divided.tensor import Divided, View, is_divided, local_part, made_whole
from lightning_parallel.techniques.tools.redirect import Pass, backward_led

PLAIN = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None)))
"""Types of arguments that are neither divided nor called."""


OWN = ("lightning_parallel.", "torch.distributed.tensor.", "torch.distributed._functional_collectives")
"""Modules of which the functions send what ranks have, and get it."""


class FunctionsGetWholes:
    """Inside, functions of autograd get whole tensors, and functions that the user compiled run eagerly.

    `torch.autograd.backward` gets the leaves of divided inputs, which it would not find in the graph. And views
    remember the operations that made them, as torch has them do where there are no strides: after changes in place
    they have their history by these. By strides, views of which a rank has no element have none that can be
    differentiated twice, and other ranks would wait for that rank in backward.
    """

    _depth: ClassVar[int] = 0
    _within: ClassVar[ExitStack]
    _stance: ClassVar[str]

    def __enter__(self) -> None:
        cls = FunctionsGetWholes
        if not cls._depth:
            cls._within = ExitStack()
            # Function.apply looks up the `apply` of the class below it, at each call: that class has none of its own,
            # only that of C. So code that took apply earlier, as in `norm = MyNorm.apply`, comes by here, too.
            _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
            cls._within.callback(delattr, _SingleLevelFunction, "apply")
            stance: Any = torch.compiler.set_stance("force_eager")
            cls._stance = stance.prev.stance
            cls._within.enter_context(stance)
            cls._within.enter_context(_force_original_view_tracking(True))
            cls._within.enter_context(backward_led(_to_leaves))
        cls._depth += 1

    def __exit__(self, *_: object) -> None:
        cls = FunctionsGetWholes
        cls._depth -= 1
        if not cls._depth:
            cls._within.close()

    @classmethod
    def compiling(cls) -> AbstractContextManager[Any]:
        """Return a context for the call of a compiled block, which gets plain tensors: it runs compiled."""
        stance: AbstractContextManager[Any] = torch.compiler.set_stance(cls._stance) if cls._depth else nullcontext()
        return stance

    @classmethod
    @contextmanager
    def blocks(cls, stance: str) -> Iterator[None]:
        """Inside, compiled blocks run by this stance of the compiler."""
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
    """Run a function of autograd on whole tensors; what it changes in place changes in the divided ones."""
    below: Any = super(_SingleLevelFunction, cls)
    if cls.__name__ == "RegisterPostBackwardFunction":  # of `fully_shard`: returns what a block gets
        group, *inputs = map(computing, args)
        noted = below.apply(group, *map(local_part, inputs))
        pairs = zip(inputs, noted, strict=True)
        return tuple(Divided(own, each.cuts) if is_divided(each) else own for each, own in pairs)
    if cls.__module__.startswith(OWN) or PLAIN.issuperset(map(type, args)):
        return below.apply(*args, **kwargs)
    given = list(map(computing, args))
    taken: list[tuple[Any, Tensor, int]] = []  # divided tensors, the wholes that the function gets, and their versions
    for place, each in enumerate(given):
        if is_divided(each):
            whole = given[place] = each.whole(cls.__name__)
            taken.append((each, whole, 0 if whole.is_inference() else whole._version))
        elif callable(each) and not isinstance(each, (type, GivesWholes)):
            given[place] = GivesWholes(each)
    result = below.apply(*given, **kwargs)
    for divided, whole, version in taken:
        if not whole.is_inference() and whole._version != version:
            # What the function changed in the whole that it got, and what changes there later.
            view = View(whole, divided, divided.own, (-1, divided.own._version))
            view.take_changes()
            divided.only.ranks.viewed.append(view)
    return result


class GivesWholes:
    """What a function of autograd calls, as a reentrant checkpoint does with a layer: its results are whole.

    Within it rules act, in the forward of the function as in its backward, where a checkpoint computes again.

    Args:
        called: a function, or a module.
    """

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        with _set_fwd_grad_enabled(True):  # what `in_function` asks for
            result = self._called(*args, **kwargs)
        return made_whole(result, "a torch.autograd.Function")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._called, name)


def _to_leaves(backward: Callable[..., None], given: Pass) -> None:
    """Run `torch.autograd.backward` with the leaves of divided inputs.

    Raises:
        RuntimeError: gradients of parameters are to have a graph, which those lack that are summed when the step ends.
    """
    asked = given.inputs is not None and not any(
        isinstance(each, (Divided, nn.Parameter)) for each in tree_leaves(given.inputs)
    )
    if given.create_graph and not asked:
        raise RuntimeError(
            "backward(create_graph=True) for gradients of parameters, of which ranks sum some up when a step ends; use "
            "torch.autograd.grad(loss, parameters, create_graph=True), whose results are complete and have a graph"
        )
    backward(*given._replace(inputs=tree_map_only((Divided, Part), lambda each: computing(each).own, given.inputs)))
