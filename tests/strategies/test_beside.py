"""Parameters that a module has in lists, helpers and functions of its own, beside its tree, follow what ranks keep."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.test_orders_of_steps import Chain, check


class Average:
    def __init__(self, parameters: Any) -> None:
        self.parameters = [parameters]

    def step(self, rate: float) -> None:
        for parameter in self.parameters[0]:
            parameter.mul_(1 - rate)


class Beside(Chain):
    """Takes parameters before ranks divide them: for a penalty, for what decays, and for what a hook reads."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = {"up": [layer.up.weight for layer in self.layers]}
        self.decays, self.average = {*self.ups["up"]}, Average(tuple(self.parameters()))
        first = self.layers[0].down.weight
        self.of_first = partial(lambda scale: scale * first.square().mean(), 0.5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        kept = [parameter for parameter in self.average.parameters[0] if parameter in self.decays]
        penalty = sum(parameter.abs().sum() for parameter in kept) + self.ups["up"][-1].square().sum() + self.of_first()
        return super().training_step(batch, batch_idx) + 0.01 * penalty

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.seen.append(float(sum(parameter.detach().norm() for parameter in self.ups["up"])))
        with torch.no_grad():
            self.average.step(0.01)

    def on_train_end(self) -> None:
        assert self.ups["up"][0].shape == self.layers[0].up.weight.shape

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.average.parameters[0], lr=0.1)


class Late(Beside):
    """Takes some when the run begins, and in its first step."""

    def on_train_start(self) -> None:
        self.late = [self.layers[1].down.weight]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        vars(self).setdefault("taken", (self.layers[2].up.bias,))
        late = self.late[0].square().sum() + vars(self)["taken"][0].exp().sum()
        return super().training_step(batch, batch_idx) + 0.01 * late


CASES = [
    *((Beside, layout) for layout in ("zero 2", "zero 3, recomputed", "tensor parallel", "pipeline of replicas")),
    *((Late, layout) for layout in ("zero 3, recomputed", "tensor parallel")),
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_they_are_those_that_ranks_compute_with(kind: type[Chain], layout: str) -> None:
    check(kind, layout)
