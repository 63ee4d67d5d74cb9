"""The hidden state on its way from one block to the next while the sequence is split."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel.techniques.tensor_parallel.whole.divided_tensor import DividedTensor

FIRST = None
"""Of a block's results, the first tensor, where nothing is known about them."""


class DividedHidden(DividedTensor):
    """What a block returned: the next one takes this rank's part, whatever else looks at it sees the whole sequence."""

    GATHERED = (
        "The hidden state between blocks is gathered from all tensor-parallel ranks for {}; a block that gets it as "
        "the one before returned it does without"
    )


def on_split(outputs: Any, which: Collection[int] | None, change: Callable[[Tensor], Tensor]) -> Any:
    """The results of a block, with those changed that run along the split sequence.

    Args:
        outputs: what the block returned.
        which: their places among its leaves; `FIRST` for the first tensor.
        change: what happens to them.
    """
    if isinstance(outputs, Tensor):
        return change(outputs) if which is FIRST or 0 in which else outputs
    leaves, shape = tree_flatten(outputs)
    if which is FIRST:
        which = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][:1]
    return tree_unflatten([change(leaf) if k in which else leaf for k, leaf in enumerate(leaves)], shape)


def whole_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of a block with the whole in place of what is split."""

    def whole(value: Any) -> Any:
        return value.whole("an input of a block") if isinstance(value, DividedHidden) else value

    return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}
