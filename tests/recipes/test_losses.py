"""The loss in chunks of tokens is the loss, on one device and divided."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recipes.gpt import IGNORED, cross_entropy
from tests.curves import check_parity
from tests.layouts import layouts
from tests.tiers import sampled

V, C = 50, 8


def loss_and_gradients(chunks, dtype=torch.float64, ignored=5):
    """In chunks; None is torch's own."""
    torch.manual_seed(0)
    head, x = nn.Linear(C, V, bias=False, dtype=dtype), torch.randn(3, 7, C, dtype=dtype, requires_grad=True)
    labels = torch.randint(V, (3, 7))
    labels.view(-1)[:ignored] = IGNORED
    if chunks is None:
        loss = F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    else:
        loss = cross_entropy(x, head, labels, chunks)
    (3 * loss).backward()
    return loss.detach(), x.grad, head.weight.grad


def test_chunks_are_the_loss_of_torch():
    for chunks in (1, 2, 4, 21, 30):
        for got, wanted in zip(loss_and_gradients(chunks), loss_and_gradients(None), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    assert loss_and_gradients(4, ignored=21)[0].isnan(), "without targets it is no number, as in torch"


def test_low_precision_is_summed_in_single_precision():
    whole, parts = loss_and_gradients(1, torch.bfloat16), loss_and_gradients(4, torch.bfloat16)
    assert parts[0].dtype == torch.float32
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-6, atol=0)


class Largest(torch.overrides.TorchFunctionMode):
    """The most elements of logits in one tensor."""

    most = 0

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


LAYOUTS = layouts("pipeline x data parallel", "zero 3", "context", "tensor x zero 2")


@sampled(1, "layout", LAYOUTS)
def test_loss_in_chunks_trains_as_in_one_process(layout):
    ranks, readers, strategy = LAYOUTS[layout]
    options = {"model": {"loss_chunks": 3}, "data": {"ignored": 0.4}, "max_epochs": 1, "precision": "64-true"}
    check_parity("gpt", ranks, strategy, data_ranks=readers, rtol=1e-9, **options)
