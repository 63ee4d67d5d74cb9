"""Recomputed activations train the same and are not kept."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from lightning_parallel.plan.plan import ParallelPlan
from lightning_parallel.strategies.named import HybridStrategy
from lightning_parallel.techniques.activation_checkpoint import ActivationCheckpoint
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.tools.redirect import default_dtype, restore_forward
from lightning_parallel.techniques.zero import Zero
from tests.grounds import ground
from tests.live import kept_for_backward
from tests.models import build, loaders
from tests.techniques.parity import check
from tests.tiers import covering, sampled

Mode = Literal["full", "selective"]
ROWS: list[tuple[str, Any, Mode]] = [
    ("llama", Zero(2, stage=3), "full"),
    ("gpt2", DataParallel(2), "selective"),
    ("gpt2", Zero(2, stage=2), "full"),
    ("llama", Zero(2, stage=1), "selective"),
]


@sampled(1, ("column", "technique", "mode"), ROWS)
def test_recomputed_blocks_train_as_one_process(column: str, technique: Any, mode: Mode) -> None:
    check(column, 2, partial(HybridStrategy, technique, ActivationCheckpoint(mode)), 2)


class Operations(TorchDispatchMode):
    """Counts the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def measured(mode: Mode | None) -> tuple[int, Counter[str], list[Tensor]]:
    """The bytes of activations kept for backward, the operations of backward, and the gradients."""
    model = build("llama")
    if mode:
        technique: Any = ActivationCheckpoint(mode)
        technique.divide(model, ground(model), None)
    losses: list[Tensor] = []
    batch = next(iter(loaders("llama", 8).train))
    kept = kept_for_backward(lambda: losses.append(model.loss(batch)), model.parameters())
    with Operations() as operations:
        losses[0].backward()
    for module in model.modules():
        restore_forward(module)
    return kept, operations.counts, gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def test_full_recomputes_everything_and_selective_no_products() -> None:
    (all_kept, plain, expected), full, selective = measured(None), measured("full"), measured("selective")
    attention = [name for name in full[1] if "scaled_dot_product" in name and "backward" not in name]
    for _, _, found in (full, selective):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert full[0] < 0.25 * all_kept
    assert sum(full[1][name] for name in attention) == 4
    assert not {*attention} & {*plain, *selective[1]}
    assert selective[1]["aten.mm.default"] == plain["aten.mm.default"]
    assert selective[1]["aten.silu.default"] == 4


class Grouped(nn.Module):
    """Experts by one grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 16, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([8, 16], dtype=torch.int32)
        return F.grouped_mm(x.sin(), self.weight, offs=ends).sin()


def test_selective_keeps_grouped_products() -> None:
    x = torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)
    counts = []
    for mode in (None, "selective", "full"):
        [forward] = checkpointed([Grouped()], mode)  # type: ignore[arg-type]
        out = forward(x).sum()
        with Operations() as operations:
            out.backward()
        counts.append(sum(count for name, count in operations.counts.items() if "_grouped_mm" in name))
    assert counts[1] == counts[0] == counts[2] - 1


class Noting(nn.Module):
    """Writes into the containers that it is given, and reads what stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, losses: list[Tensor], state: dict[str, Any]) -> Tensor:
        hidden = hidden + self.map(hidden).tanh() * state["scale"] * len(losses)
        losses.append(hidden.square().mean())
        state["aux"] = state["aux"] + losses[-1].sin()
        return hidden


def checkpointed(blocks: list[nn.Module], mode: Mode | None, compiled: bool = False) -> list[Callable[..., Any]]:
    """The forwards of blocks, whose activations are recomputed in this mode."""
    model = nn.Module()
    model.blocks = nn.ModuleList(blocks)
    if mode:
        technique: Any = ActivationCheckpoint(mode)
        technique.divide(model, ground(model, plan=ParallelPlan(blocks="blocks.*")), None)
    torch.compiler.reset()
    return [torch.compile(block.forward, backend="aot_eager") if compiled else block.forward for block in blocks]


def noted(mode: Mode | None, compiled: bool) -> tuple[int, Tensor, list[Tensor]]:
    """How many losses blocks wrote, the loss with what they wrote, and the gradients."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Noting(), Noting()]
    hidden, losses, state = torch.randn(2, 4), [torch.ones(())], {"aux": torch.zeros(()), "scale": 2.0}
    for forward in checkpointed(blocks, mode, compiled):
        hidden = forward(hidden, losses, state)
    loss, count = hidden.sum() + sum(losses) + state["aux"], len(losses)
    losses.append(loss)  # a step may go on with its containers, too
    state.update(scale=5.0)
    loss.backward()
    return count, loss.detach(), [gradient for block in blocks for gradient in gradients(block)]


@covering(mode=["full", "selective"], compiled=[False, True])
@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_what_blocks_write_into_containers_is_the_steps(mode: Mode, compiled: bool) -> None:
    expected, found = noted(None, False), noted(mode, compiled)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Remembers(nn.Module):
    """A layer that finds its keys in a library's cache by its number."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.map = layer_idx, nn.Linear(4, 4)

    def forward(self, hidden: Tensor, past_key_values: Any = None) -> Tensor:
        keys = self.map(hidden)[:, None]
        if past_key_values is not None:
            keys, _ = past_key_values.update(keys, keys, self.layer_idx)
        return hidden + keys.mean(2).tanh()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_cache_with_learned_prefixes_is_an_input(mode: Mode) -> None:
    """Another cache is left out, by whatever name it comes."""
    blocks, hidden = [Remembers(k) for k in range(2)], torch.randn(2, 3, 4)
    prefix = torch.randn(2, 1, 5, 4).requires_grad_()

    def found(forwards: Any) -> Any:
        cache, made = DynamicCache(), hidden
        for layer in range(2):
            cache.update(prefix, prefix, layer)
        for forward in forwards:
            made = forward(made, past_key_values=cache).mean(1, keepdim=True).expand_as(hidden)
        return torch.autograd.grad(made.square().sum(), [prefix, *blocks[0].parameters()])

    expected, block = found(blocks), Remembers(0)
    torch.testing.assert_close(found(checkpointed(blocks, mode)), expected, rtol=0, atol=0)

    class Named(nn.Module):
        def forward(self, hidden: Tensor, cache: Any) -> Tensor:
            return block(hidden, cache)  # type: ignore[no-any-return]

    alone, [forward] = torch.autograd.grad(block(hidden).sum(), [*block.parameters()]), checkpointed([Named()], mode)
    for given in ((lambda cache: forward(hidden, cache)), (lambda cache: forward(hidden, cache=cache))):
        cache = DynamicCache()
        again = torch.autograd.grad(given(cache).sum(), [*block.parameters()])
        torch.testing.assert_close(again, alone, rtol=0, atol=0)
        assert cache.get_seq_length() == 0


class Ramped(nn.Module):
    """Makes tensors in the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        ramp = torch.arange(4) / 4 + torch.zeros(2, 4)
        return hidden + self.map(hidden @ ramp.T @ ramp).tanh() * ramp.sin()


@pytest.mark.parametrize(("mode", "dtype"), [("full", torch.bfloat16), ("selective", torch.float64)])
def test_recomputation_has_the_default_dtype_of_its_forward(mode: Mode, dtype: torch.dtype) -> None:
    block, hidden = Ramped().to(dtype), torch.randn(2, 4, dtype=dtype)

    def found(forward: Callable[..., Any]) -> tuple[Tensor, ...]:
        with default_dtype(dtype):  # as a precision plugin sets it
            loss = forward(hidden).sum()
        return torch.autograd.grad(loss, tuple(block.parameters()))

    expected = found(block)
    torch.testing.assert_close(found(checkpointed([block], mode)[0]), expected, rtol=0, atol=0)
    assert torch.get_default_dtype() == torch.float32
