"""What the groups of an optimizer hold: parameters as ranks have them, or what stands for these where users look."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.techniques.tools.shards import bear

Pair = tuple[Tensor, Tensor]
"""A parameter of which ranks hold parts, and what stands for it."""


def exchange(optimizer: Optimizer, pairs: Sequence[Pair]) -> None:
    """Puts the second of each pair where the first is: in groups, and as that which a state belongs to."""
    after_of = {id(before): after for before, after in pairs}
    for group in optimizer.param_groups if pairs else ():
        group["params"][:] = [after_of.get(id(parameter), parameter) for parameter in group["params"]]
    for before, after in pairs:
        if before in optimizer.state:
            optimizer.state[after] = optimizer.state.pop(before)


def turned(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs that take an exchange back."""
    return [(after, before) for before, after in pairs]


def learns_as(parameter: nn.Parameter, value: Tensor, before: nn.Parameter | None) -> nn.Parameter:
    """What an optimizer of the user's takes for the parameter in whose place it steps it.

    Args:
        parameter: some optimizers ask whether it learns, or for attributes that the user gave it.
        value: whose memory it has; an optimizer may have given it other, as a part of one vector.
        before: what stood for it before, to do so again.
    """
    made = nn.Parameter(value, parameter.requires_grad) if before is None else before
    made.data = value
    bear(made, parameter)
    made.requires_grad_(parameter.requires_grad)
    return made


def filled(whole: nn.Parameter, room: Tensor, value: Tensor) -> nn.Parameter:
    """The whole with a value, and with memory for it: all that of its room."""
    room.untyped_storage().resize_(value.untyped_storage().nbytes())
    whole.copy_(value)
    return whole


def emptied(whole: Tensor, room: Tensor) -> None:
    """The whole and its room have no memory. ⇄ `filled`."""
    room.untyped_storage().resize_(0)
    whole.data = room
