"""Experts that are called in odd ways train as in one process, or are refused with a reason."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel import DataParallel, ExpertParallelStrategy, ParallelPlan, TensorParallel
from lightning_parallel.plan.experts import find_experts
from lightning_parallel.techniques.expert_parallel import ExpertParallel
from tests.curves import train
from tests.heard import heard
from tests.layouts import hybrid
from tests.ranks import ranks, run_on_ranks

REFUSED = {
    "looped_experts": "finds no experts in .* stack the weights of a list of experts",
    "slots_experts": "with a result of shape",
    "mixing_experts": "the sum of its experts' outputs for this token alone",
    "dense_experts": r"is not called as experts\(tokens, indices, weights\)",
}


@ranks(2)
def test_other_forms_of_experts_are_refused_with_a_remedy() -> None:
    for column, text in REFUSED.items():
        with pytest.raises(ValueError, match=f"{text}.* shard .* with Zero"):
            train(column, partial(ExpertParallelStrategy, 2), data_ranks=2, max_epochs=1, data={"samples": 16})
    with heard(logging.INFO) as lines:
        run = {"model": {"n": 5}, "data": {"samples": 16}, "max_epochs": 1}
        train("banked_experts", ExpertParallelStrategy, data_ranks=2, **run)
    assert any("divides 5 of network.blocks.0.mixture.experts" in line for line in lines) == (dist.get_rank() == 0)


@pytest.mark.parametrize(
    ("column", "n", "strategy", "said"),
    [
        (
            "tied_banks",
            4,
            hybrid(DataParallel(2), TensorParallel(2), ExpertParallel(2)),
            "untie it, or leave out tensor",
        ),
        (
            *("reversing_banks", 2, partial(ExpertParallelStrategy, 2)),
            "rank 0 calls network.blocks.0.mixture.experts; rank 1 calls network.blocks.1.mixture.experts: under",
        ),
    ],
)
def test_experts_called_in_ways_that_ranks_cannot_follow(column: str, n: int, strategy: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        run_on_ranks(n, train, column, strategy, data_ranks=2, data={"samples": 16})


class ScaledHeads(nn.Module):
    """Attention with a scale for each head, (heads, 1, 1); its forward takes as many values as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(4, 1, 1)), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return self.out(x * self.scale + bias) * mask


class Head(nn.Conv1d):
    """A head that is a convolution of size 1."""


def test_kernels_and_scales_of_heads_are_no_experts() -> None:
    block = {"mix": nn.Conv1d(8, 8, 3), "attention": ScaledHeads(), "head": Head(8, 4, 1), "out": nn.Linear(8, 4)}
    assert find_experts(nn.ModuleDict(block), ParallelPlan()) == []
