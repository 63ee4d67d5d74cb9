"""Modules that cast their own parameters in their forward, as some routers do: ranks share what was there before."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

PRECISIONS = {torch.float64: "64-true", torch.bfloat16: "bf16-true", torch.float16: "16-true"}


def refuse_casts(model: nn.Module, casts: Iterable[tuple[Tensor, torch.dtype, torch.dtype]]) -> None:
    """Raise TypeError for the first parameter that was cast.

    Args:
        model: that has them.
        casts: parameters of it, the dtypes that they had, and those that they have now.
    """
    for parameter, before, dtype in casts:
        if dtype == before:
            continue
        name = next(name for name, own in model.named_parameters() if own is parameter)
        raise TypeError(
            f"a module cast {name} from {before} to {dtype} in its forward, but under ZeRO ranks keep parts of "
            "it in the dtype that it had; use DataParallelStrategy, where every rank keeps it whole, or a precision in "
            f"which there is nothing to cast: precision={PRECISIONS.get(dtype, '32-true')!r}"
        )
