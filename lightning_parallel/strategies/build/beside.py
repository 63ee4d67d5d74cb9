"""Parameters that a module has in lists, dicts and helpers of its own too, beside its tree.

Techniques that divide a module put others in the place of its parameters. What somebody took before, as for a penalty
or an average of weights, does not follow: to read it gives old values, to write it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_parallel.techniques.tools.telling import warn

OF_LIBRARIES = {*vars(nn.Module()), *vars(LightningModule())}
LIBRARIES = ("torch", "lightning", "torchmetrics", "builtins", "collections", "transformers")
DEEP = 3


def parameters_beside(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What holds parameters beside the module's tree, "layers.0.kept", and each of these."""
    found: list[tuple[str, nn.Parameter]] = []
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in OF_LIBRARIES:
                found += [(f"{path}.{name}".lstrip("."), each) for each in _within(value, DEEP)]
    return found


def _within(value: Any, deep: int) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module) or not deep:
        return
    elif isinstance(value, (list, tuple, set, frozenset)):
        for member in value:
            yield from _within(member, deep - 1)
    elif isinstance(value, dict):
        yield from _within(list(value.values()), deep - 1)
    elif type(value).__module__.partition(".")[0] not in LIBRARIES and isinstance(
        getattr(value, "__dict__", None), dict
    ):
        yield from _within(list(vars(value).values()), deep - 1)


def tell_of_old(names: set[str]) -> None:
    """Warns of what holds parameters that are no part of the module any more."""
    if names:
        warn(
            f"{', '.join(sorted(names))} of the module holds parameters for which ranks have put others, as each keeps "
            "a part: what is read there is old, and what is written there is lost. Take parameters from the module "
            "where you need them, as by self.parameters() in a hook or step, or use data parallel, or ZeRO 1 or 2"
        )
