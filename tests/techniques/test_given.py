"""What a block was given and keeps in Python state, for another block to find: on another rank nobody kept it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.techniques.observed.positions import Traversal
from lightning_parallel.techniques.observed.recorder import traverse
from lightning_parallel.techniques.pipeline_parallel.cut import cut

WIDTH = 4


class Block(nn.Linear):
    """Block 0 keeps something that it was given, block 2 adds it."""

    def __init__(self, state: dict[str, Any], number: int, keep: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.state, self.number, self.keep = state, number, keep

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        if self.number == 0:
            self.state["kept"] = self.keep(x, more)
        y = super().forward(x)
        return y + self.state["kept"] if self.number == 2 else y


def look(keep: Callable[[Tensor, Any], Tensor], more: Callable[[Tensor, Tensor], Any]) -> Traversal:
    state: dict[str, Any] = {}
    stem, blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(state, number, keep) for number in range(4))
    model = nn.ModuleDict({"stem": stem, "blocks": blocks})
    batch = torch.randn(8, WIDTH)

    def step() -> Tensor:
        x = stem(batch)
        first = x
        for block in blocks:
            x = block(x, more(batch, first))
        return x.sum()

    return traverse(model, {f"blocks.{k}": block for k, block in enumerate(blocks)}, step, torch.device("cpu"))


@pytest.mark.parametrize(
    ("keep", "more"),
    [
        (lambda x, more: x, lambda batch, first: None),
        (lambda x, more: x[:, :1], lambda batch, first: None),
        (lambda x, more: more, lambda batch, first: batch),
        (lambda x, more: more[1][0], lambda batch, first: (0, (first,))),
    ],
    ids=["its input", "a view of it", "the batch", "in tuples"],
)
def test_what_a_block_keeps_is_refused_behind_a_cut(keep: Any, more: Any) -> None:
    seen = look(keep, more)
    with pytest.raises(ValueError, match=r"block blocks\.2 uses a tensor .* made in block blocks\.0"):
        cut(seen, 2, (2, 2))
    cut(seen, 2, (3, 1))


def test_what_all_blocks_are_given_goes_to_all() -> None:
    seen = look(lambda x, more: torch.zeros(()), lambda batch, first: first)
    used = {skip.used for skip in seen.skip_tensors}
    assert used == {3, 5, 7}
    assert cut(seen, 2, (2, 2)).carried[("stem", 0)].last == 1


def test_what_a_block_changes_in_place_is_changed_for_its_caller() -> None:
    seen = look(lambda x, more: more.mul_(2).detach() * 0 + 1, lambda batch, first: first)
    with pytest.raises(ValueError, match=r"uses a tensor .* made in block blocks\.0"):
        cut(seen, 2, (1, 3))
