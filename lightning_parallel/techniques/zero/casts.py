"""Refusal of modules that cast their own parameters in the forward, as some routers do; shards keep the old dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

PRECISIONS = {torch.float64: "64-true", torch.bfloat16: "bf16-true", torch.float16: "16-true"}


def refuse_casts(model: nn.Module, casts: Iterable[tuple[Tensor, torch.dtype, torch.dtype]]) -> None:
    """Raise TypeError for the first parameter that was cast.

    Args:
        model: the model that has the parameters.
        casts: triples of a parameter, its dtype before the forward, and its dtype now.
    """
    for parameter, before, dtype in casts:
        if dtype == before:
            continue
        name = next(name for name, candidate in model.named_parameters() if candidate is parameter)
        raise TypeError(
            f"a module cast {name} from {before} to {dtype} in its forward, but under ZeRO ranks hold shards of it in "
            "the old dtype; use DataParallelStrategy, which keeps full parameters, or a precision that needs no cast: "
            f"precision={PRECISIONS.get(dtype, '32-true')!r}"
        )
