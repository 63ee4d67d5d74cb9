"""Experts that are called in odd ways train as in one process, or are refused with a reason."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_parallel import DataParallel, ExpertParallelStrategy, ParallelPlan, TensorParallel
from lightning_parallel.plan.experts import find_experts
from lightning_parallel.techniques.expert_parallel import ExpertParallel
from lightning_parallel.techniques.expert_parallel.calls import Calls
from lightning_parallel.techniques.expert_parallel.capacity import Capacity
from lightning_parallel.techniques.expert_parallel.stacked import StackedExperts
from lightning_parallel.techniques.tools.telling import log
from tests.curves import train
from tests.ranks import ranks, run_on_ranks
from tests.techniques.tensor_layouts import check, hybrid
from tests.tiers import sampled

ODD = ("followed_experts", "tied_experts", "sharing_experts", "slots_experts", "masked_experts")
REFUSED = {
    "twice_experts": (ValueError, "share its parameters instead of the module"),
    "chained_experts": (RuntimeError, "no expert's input by the result of another"),
    "apart_experts": (ValueError, "let the expert's own forward call it"),
    "outside_experts": (ValueError, "call experts in that module's forward"),
    "pairs_experts": (ValueError, "returns one tensor with a row for each token"),
}


@sampled(1, "column", ODD)
def test_calls_of_experts_that_one_process_takes(column: str) -> None:
    check(column, 2, partial(ExpertParallelStrategy, 2), 2, max_epochs=1, precision="64-true", rtol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("column", [column for column in ODD if column != "sharing_experts"])
def test_and_beside_tensor_parallel(column: str) -> None:
    layout = hybrid(DataParallel(2), TensorParallel(2), ExpertParallel(2))
    check(column, 4, layout, 2, max_epochs=1, precision="64-true", rtol=1e-9)


@ranks(2)
def test_what_cannot_be_led_says_so() -> None:
    for column, (kind, text) in REFUSED.items():
        with pytest.raises(kind, match=text):
            train(column, partial(ExpertParallelStrategy, 2), data_ranks=2, max_epochs=1, data={"samples": 16})


def test_a_whole_weight_of_experts_beside_tensor_parallel() -> None:
    layout = hybrid(DataParallel(2), TensorParallel(2), ExpertParallel(2))
    with pytest.raises(AssertionError, match="untie it, or leave tensor parallel out"):
        run_on_ranks(4, train, "sharing_experts", layout, data_ranks=2, data={"samples": 16})


def test_kernels_beside_a_linear_map_are_no_experts() -> None:
    block = nn.ModuleDict({"mix": nn.Conv1d(8, 8, 3), "out": nn.Linear(8, 8)})
    assert find_experts(block, ParallelPlan()) == []


class ScaledHeads(nn.Module):
    """Attention with a scale for each head, (heads, 1, 1); its forward takes as many values as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(4, 1, 1)), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        return self.out(x * self.scale + bias) * mask


class Head(nn.Conv1d):
    """A head that is a convolution of size 1."""


def test_scales_of_heads_and_kernels_of_size_1_are_no_experts() -> None:
    block = nn.ModuleDict({"attention": ScaledHeads(), "head": Head(8, 4, 1), "out": nn.Linear(8, 4)})
    assert find_experts(block, ParallelPlan()) == []


@ranks(2)
def test_a_call_with_numbers_alone() -> None:
    module = nn.Module()
    module.forward = lambda ids, which, mask: ids  # type: ignore[assignment]
    module.weight = nn.Parameter(torch.ones(4, 2, 2))
    group = init_device_mesh("cpu", (2,)).get_group()
    capacity = Capacity(None, group)
    stacked = StackedExperts("experts", module, 4, Calls(group), None, capacity, capacity, True, lambda: None)
    numbers = torch.ones(4, 2, dtype=torch.long)
    assert stacked.wrap(module.forward)(numbers, numbers, numbers) is numbers


@sampled(1, "column", ["skipping_experts", "skipping_banks", "skipping_mixing"])
def test_a_rank_that_leaves_a_call_out(column: str) -> None:
    told = r"calls network.blocks.1.mixture.experts, and rank 1 no experts any more"
    with pytest.raises(AssertionError, match=told):
        run_on_ranks(2, train, column, partial(ExpertParallelStrategy, 2), data_ranks=2, data={"samples": 16})


@ranks(2)
def test_experts_that_divide_over_no_ranks_are_told() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    train("looped_experts", ExpertParallelStrategy, data_ranks=2, model={"n": 5}, data={"samples": 16}, max_epochs=1)
    log.removeHandler(handler)
    assert any("divides 5 of network.blocks.0.mixture.experts" in line for line in lines) == (dist.get_rank() == 0)
