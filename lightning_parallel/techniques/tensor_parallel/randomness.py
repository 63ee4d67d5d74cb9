"""Dropout on divided activations draws differently on every rank; on whole ones all ranks draw alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OwnRandomness:
    """Switches between what ranks draw alike and what each draws for itself.

    Its own numbers start from one that all ranks draw, so that a recomputation, which starts from the same state,
    draws the same ones again.

    Args:
        rank: among the ranks of the axis tp.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._alike: tuple[Tensor, Tensor | None] | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """From here on ranks draw differently."""
        if self._alike is not None:
            return
        seed = int(torch.randint(2**31, ()).item()) + 7_919 * (self._rank + 1)
        on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._alike = torch.get_rng_state(), on_device
        torch.default_generator.manual_seed(seed)
        if on_device is not None:
            torch.cuda.manual_seed(seed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """From here on they draw alike, as if nothing had been drawn since `begin`."""
        if self._alike is None:
            return
        on_host, on_device = self._alike
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device)
        self._alike = None


def draws(block: nn.Module) -> bool:
    """Whether a block may drop activations while it trains."""
    return any(
        isinstance(value, float) and value > 0 and (name == "p" or "drop" in name)
        for module in block.modules()
        for name, value in vars(module).items()
        if name != "p" or "Dropout" in type(module).__name__
    )
