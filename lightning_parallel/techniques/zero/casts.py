"""Modules that cast their own parameters in their forward, as some routers do: ranks share what was there before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.step import Step, StepFn, WrappedStep

T = TypeVar("T")


def refuse_casts(model: nn.Module, casts: Iterable[tuple[Tensor, torch.dtype, torch.dtype]]) -> None:
    """Raises for the first parameter that was cast.

    Args:
        model: that has them.
        casts: parameters of it, the dtypes that they had, and those that they were given.

    Raises:
        TypeError: names the parameter.
    """
    for parameter, before, dtype in casts:
        name = next(name for name, own in model.named_parameters() if own is parameter)
        raise TypeError(
            f"a module cast {name} from {before} to {dtype} in its forward, but under ZeRO ranks keep parts of "
            "it in the dtype that it had; use DataParallelStrategy, where every rank keeps it whole, or a precision in "
            f"which there is nothing to cast: {_precision(dtype)}"
        )


def _precision(dtype: torch.dtype) -> str:
    names = {torch.float64: "64-true", torch.bfloat16: "bf16-true", torch.float16: "16-true"}
    return f"precision={names.get(dtype, '32-true')!r}"


class UncastStep(WrappedStep):
    """Refuses a forward that casts parameters.

    Args:
        inner: the step to wrap.
        model: whose parameters every rank has whole, and steps in parts.
    """

    def __init__(self, inner: Step, model: nn.Module) -> None:
        super().__init__(inner)
        self._model, self._parameters = model, list(model.parameters())

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`.

        Raises:
            TypeError: names a parameter that was cast.
        """
        before = self._dtypes()
        output = self.inner.forward(run, *args, **kwargs)
        if (after := self._dtypes()) != before:
            changes = zip(self._parameters, before, after, strict=True)
            refuse_casts(self._model, (change for change in changes if change[1] != change[2]))
        return output

    def _dtypes(self) -> list[torch.dtype]:
        with torch._C.DisableTorchFunctionSubclass():  # rows that arrive are not waited for
            return [parameter.dtype for parameter in self._parameters]
