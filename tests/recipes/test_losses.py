"""The loss in chunks of tokens is the loss, on one device and divided."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_parallel import (
    ContextParallel,
    DataParallel,
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from recipes.losses import IGNORED, cross_entropy
from tests.curves import check_parity
from tests.techniques.tensor_layouts import hybrid
from tests.tiers import sampled

V, C = 50, 8


def case(dtype=torch.float64, labels_ignored=5):
    torch.manual_seed(0)
    head, x = nn.Linear(C, V, bias=False, dtype=dtype), torch.randn(3, 7, C, dtype=dtype, requires_grad=True)
    labels = torch.randint(V, (3, 7))
    labels.view(-1)[:labels_ignored] = IGNORED
    return head, x, labels


def loss_and_gradients(chunks, dtype=torch.float64, **case_options):
    head, x, labels = case(dtype, **case_options)
    loss = cross_entropy(x, head, labels, chunks)
    (3 * loss).backward()
    return loss.detach(), x.grad, head.weight.grad


@pytest.mark.parametrize("chunks", [1, 2, 4, 21, 30])
def test_chunks_are_the_loss_of_torch(chunks):
    head, x, labels = case()
    loss = F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    (3 * loss).backward()
    for got, wanted in zip(loss_and_gradients(chunks), (loss.detach(), x.grad, head.weight.grad), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_low_precision_is_summed_in_single_precision():
    whole, parts = loss_and_gradients(1, torch.bfloat16), loss_and_gradients(4, torch.bfloat16)
    assert parts[0].dtype == torch.float32
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-6, atol=0)


def test_without_targets_it_is_no_number_as_in_torch():
    assert loss_and_gradients(4, labels_ignored=21)[0].isnan()


class Largest(torch.overrides.TorchFunctionMode):
    """The most elements of logits in one tensor."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (V,):
            self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize(("chunks", "rows"), [(1, 21), (3, 7)])
def test_logits_of_all_tokens_never_exist(chunks, rows):
    with Largest() as seen:
        loss_and_gradients(chunks)
    assert seen.most == rows * V


LAYOUTS = {
    "pp2 x dp2": (4, hybrid(PipelineParallel(2, microbatches=2), DataParallel(2)), 2),
    "dp2": (2, DataParallelStrategy, 2),
    "zero3": (2, ZeroStrategy, 2),
    "tp2": (2, partial(TensorParallelStrategy, 2), 1),
    "pp2": (2, partial(PipelineParallelStrategy, 2), 1),
    "cp2": (2, hybrid(ContextParallel(2)), 1),
    "tp2 x zero2": (4, hybrid(TensorParallel(2), Zero(2, stage=2)), 2),
    "none": (1, HybridStrategy, 1),
}


@sampled(1, "layout", LAYOUTS)
def test_divided_over_ranks_it_trains_as_one_process_does(layout):
    ranks, strategy, readers = LAYOUTS[layout]
    options = {"model": {"loss_chunks": 3}, "data": {"ignored": 0.4}, "max_epochs": 1, "precision": "64-true"}
    check_parity("gpt", ranks, strategy, data_ranks=readers, rtol=1e-9, **options)
