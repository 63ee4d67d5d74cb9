"""The tensors of a model stay what they are while a step is observed, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def tensors_kept(model: nn.Module) -> Iterator[dict[str, torch.dtype]]:
    """Afterwards buffers hold what they held, as a step may count in them, and the model's tensors are the same ones.

    Compiled functions run as they are written meanwhile: `torch.compile` follows no modes.

    Returns:
        By the FQN of parameters that the step cast, their new dtype; known afterwards.
    """
    values = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    shapes = [(parameter, parameter.data) for parameter in model.parameters() if parameter.is_meta]  # cast as they are
    before = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}
    cast: dict[str, torch.dtype] = {}
    try:
        with in_place(model), torch.compiler.set_stance("force_eager"):
            try:
                yield cast
            finally:
                now = ((name, p.dtype) for name, p in model.named_parameters(remove_duplicate=False))
                cast.update({name: dtype for name, dtype in now if before.get(name, dtype) != dtype})
    finally:
        for buffer, value in values:
            buffer.copy_(value)
        for parameter, data in shapes:
            if parameter.dtype != data.dtype:
                parameter.data = data


@contextmanager
def in_place(model: nn.Module) -> Iterator[None]:
    """Afterwards modules have the parameters, buffers and parts that they had: what code put there has only shapes.

    A module may cast its own weight in its forward, count in a buffer by putting another one in its place, or copy a
    part of the model when it first runs.
    """
    modules = list(model.modules())
    tables: list[dict[str, Any]] = [t for each in modules for t in (each._parameters, each._buffers, each._modules)]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, own in zip(tables, before, strict=True):
            table.clear()
            table.update(own)
