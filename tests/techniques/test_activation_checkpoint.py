"""Recomputed activations train the same and are not kept."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.plan.plan import ParallelPlan
from lightning_parallel.strategies.named import HybridStrategy
from lightning_parallel.techniques.activation_checkpoint import ActivationCheckpoint
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.divided.functions import FunctionsGetWholes
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.tools.redirect import default_dtype, restore_forward
from lightning_parallel.techniques.zero import Zero
from tests.curves import check_parity
from tests.grounds import ground
from tests.models import build, loaders
from tests.ranks import ranks
from tests.tiers import covering

Mode = Literal["full", "selective"]
LAYOUTS: dict[str, Callable[[], Any]] = {
    "data parallel": partial(DataParallel, 2),
    "zero 1": partial(Zero, 2, stage=1),
    "zero 2": partial(Zero, 2, stage=2),
    "zero 3": partial(Zero, 2, stage=3),
}


@covering(keep=1, layout=LAYOUTS, mode=("full", "selective"))
def test_parity(layout: str, mode: Mode) -> None:
    column = "llama" if layout in ("zero 1", "zero 3") else "gpt2"
    make = partial(HybridStrategy, LAYOUTS[layout](), ActivationCheckpoint(mode))
    check_parity(column, 2, make, data_ranks=2, max_epochs=1)


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
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if (start := tensor.untyped_storage().data_ptr()) not in parameters:
            kept[start] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model.loss(next(iter(loaders("llama", 8).train)))
    with Operations() as operations:
        loss.backward()
    for module in model.modules():
        restore_forward(module)
    return sum(kept.values()), operations.counts, gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def test_full_keeps_least_and_recomputes_everything() -> None:
    (all_kept, plain, expected), (kept, recomputed, found) = measured(None), measured("full")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert kept < 0.25 * all_kept
    attention = [name for name in recomputed if "scaled_dot_product" in name and "backward" not in name]
    assert sum(recomputed[name] for name in attention) == 4
    assert not any("scaled_dot_product" in name and "backward" not in name for name in plain)


def test_selective_keeps_products_and_recomputes_the_rest() -> None:
    (_, plain, expected), (_, recomputed, found) = measured(None), measured("selective")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert recomputed["aten.mm.default"] == plain["aten.mm.default"]
    assert recomputed["aten.silu.default"] == 4
    assert not any("scaled_dot_product" in name and "backward" not in name for name in recomputed)


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
def test_what_a_block_writes_into_containers_is_the_steps(mode: Mode, compiled: bool) -> None:
    expected, found = noted(None, False), noted(mode, compiled)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Prefixed(nn.Module):
    """Adds learned keys, or takes what a cache holds and adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, past_key_values: Any = None) -> Tensor:
        if isinstance(past_key_values, OneCache):
            past_key_values = past_key_values.filled(hidden)
        keys = [hidden] if past_key_values is None else [*past_key_values, hidden]
        return hidden + torch.cat(keys).sum(0).tanh() * self.map(hidden).tanh()


class OneCache:
    """A cache of keys."""

    def __init__(self) -> None:
        self.filled_with: list[Tensor] = []

    def filled(self, keys: Tensor) -> list[Tensor]:
        before = list(self.filled_with)
        self.filled_with.append(keys)
        return before


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_prefixes_are_inputs_and_caches_are_left_out(mode: Mode) -> None:
    torch.manual_seed(0)
    block, hidden, prefix = Prefixed(), torch.randn(2, 4), torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(block(hidden, past_key_values=(prefix,)).sum(), [prefix, *block.parameters()])
    [forward] = checkpointed([block], mode)
    found = torch.autograd.grad(forward(hidden, past_key_values=(prefix,)).sum(), [prefix, *block.parameters()])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    forward(hidden, past_key_values=(cache := OneCache())).sum().backward()
    assert not cache.filled_with


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
def test_a_cache_with_learned_prefixes_is_an_input(mode: Mode) -> None:
    blocks, hidden, prefix = (
        [Remembers(k) for k in range(2)],
        torch.randn(2, 3, 4),
        torch.randn(2, 1, 5, 4).requires_grad_(),
    )

    def gradients(forwards: Any) -> Any:
        cache, made = DynamicCache(), hidden
        for layer in range(2):
            cache.update(prefix, prefix, layer)
        for forward in forwards:
            made = forward(made, past_key_values=cache).mean(1, keepdim=True).expand_as(hidden)
        return torch.autograd.grad(made.square().sum(), [prefix, *blocks[0].parameters()])

    expected = gradients(blocks)
    torch.testing.assert_close(gradients(checkpointed(blocks, mode)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_cache_is_left_out_by_whatever_name_it_comes(mode: Mode) -> None:
    block, hidden = Remembers(0), torch.randn(2, 3, 4)
    expected = torch.autograd.grad(block(hidden).square().sum(), [*block.parameters()])

    def given(cache: Any, by_place: bool) -> Tensor:
        class Named(nn.Module):
            def forward(self, hidden: Tensor, cache: Any) -> Tensor:
                return block(hidden, cache)  # type: ignore[no-any-return]

        [forward] = checkpointed([Named()], mode)
        return forward(hidden, cache) if by_place else forward(hidden, cache=cache)  # type: ignore[no-any-return]

    for by_place in (True, False):
        cache = DynamicCache()
        found = torch.autograd.grad(given(cache, by_place).square().sum(), [*block.parameters()])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert cache.get_seq_length() == 0


class Ramped(nn.Module):
    """Makes tensors in the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        ramp = torch.arange(4) / 4 + torch.zeros(2, 4)
        return hidden + self.map(hidden @ ramp.T @ ramp).tanh() * ramp.sin()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputation_has_the_default_dtype_of_its_forward(mode: Mode, dtype: torch.dtype) -> None:
    block, hidden = Ramped().to(dtype), torch.randn(2, 4, dtype=dtype)

    def found(forward: Callable[..., Any]) -> tuple[Tensor, ...]:
        with default_dtype(dtype):  # as a precision plugin sets it
            loss = forward(hidden).sum()
        return torch.autograd.grad(loss, tuple(block.parameters()))

    expected = found(block)
    torch.testing.assert_close(found(checkpointed([block], mode)[0]), expected, rtol=0, atol=0)
    assert torch.get_default_dtype() == torch.float32


class Adding(nn.Module):
    """Adds what all blocks add, a vector that learns."""

    def forward(self, hidden: Tensor, vector: Tensor) -> Tensor:
        return hidden + (hidden + vector).tanh()


def added(mode: Mode | None, among: Ranks | None) -> Tensor:
    """The gradient of a vector that blocks add to hidden states; these ranks, if any, split them along the sequence."""
    torch.manual_seed(0)
    hidden, vector = torch.randn(2, 4, 4), torch.randn(4, requires_grad=True)
    if among:
        parts = among.chunks(4)
        hidden = Divided(parts.take(hidden, 1), {1: parts})
    with FunctionsGetWholes():
        learned = vector * 2
        for forward in checkpointed([Adding(), Adding(), Adding()], mode):
            hidden = forward(hidden, learned)
        loss = (hidden * vector).square().sum()
        (loss.whole() if isinstance(loss, Divided) else loss).backward()
    return vector.grad


@ranks(2)
def test_what_is_recomputed_of_divided_tensors_is_what_the_forward_did() -> None:
    among = Ranks(dist.group.WORLD, "tp", 1)
    for mode in ("full", "selective"):
        torch.testing.assert_close(added(mode, among), added(None, None))
