"""The tensors of a model stay what they are while a step is observed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers hold what they held, as a step may count in them, and parameters are the same ones.

    A module may cast its own weight in its forward: on meta that makes another parameter.
    """
    before = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    parameters = [(module._parameters, dict(module._parameters)) for module in model.modules()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
        for table, own in parameters:
            table.update(own)
