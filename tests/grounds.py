"""What techniques divide a model on, where a test divides one by itself."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_parallel.plan.find import find_plan
from lightning_parallel.plan.plan import ParallelPlan
from lightning_parallel.techniques.division import PartitionContext


def ground(model: nn.Module, mesh: Any = None, plan: ParallelPlan | None = None) -> PartitionContext:
    """A ground for techniques that take no sample."""
    return PartitionContext(mesh, plan or find_plan(model), lambda: pytest.fail("no sample is needed"))
