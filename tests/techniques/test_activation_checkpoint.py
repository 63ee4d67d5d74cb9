"""Recomputed activations train the same and are not kept."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel.strategies.hybrid import HybridStrategy
from lightning_parallel.techniques.activation_checkpoint import ActivationCheckpoint
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.tools.redirect import restore_forward
from lightning_parallel.techniques.zero import Zero
from tests.curves import check_parity
from tests.grounds import ground
from tests.models import build, loaders
from tests.tiers import covering

Mode = Literal["full", "selective"]
LAYOUTS: dict[str, Callable[[], Any]] = {
    "data parallel": partial(DataParallel, 2),
    "zero 1": partial(Zero, 2, stage=1),
    "zero 2": partial(Zero, 2, stage=2),
    "zero 3": partial(Zero, 2, stage=3),
}


@covering(keep=2, layout=LAYOUTS, mode=("full", "selective"))
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
