"""Optimizers of the user's own take what they step for the module's parameters, wherever they keep these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from lightning_parallel import TensorParallelStrategy, ZeroStrategy
from tests.curves import Curve, compare, train
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import sampled

SHORT = {"max_epochs": 1, "accumulate_grad_batches": 1, "precision": "64-true"}


class Own(optim.Optimizer):
    """Steps what is a parameter that learns, each by a rate that it knows by another of its habits."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        mine = [*parameters]
        super().__init__(mine, {"lr": 0.1})
        self.mine = mine
        self.rates = {parameter: 1 / (2 + number) for number, parameter in enumerate(mine)}
        self.by_id = {id(parameter): 1 + number / 10 for number, parameter in enumerate(mine)}
        vars(mine[0])["slow"] = True

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for parameter in self.mine:
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter.grad is not None:
                rate = self.rates[parameter] * self.by_id[id(parameter)] * (0.5 if "slow" in vars(parameter) else 1.0)
                parameter.data.sub_(rate * parameter.grad / (1 + parameter.grad.norm()))
        return loss


def trained(make_strategy: Callable[[], Any] | str, data_ranks: int = 1) -> Curve:
    model = {"optimizer": Own, "blocks": 2}
    return train("plain", make_strategy, data_ranks=data_ranks, model=model, data={"samples": 16}, **SHORT)


LAYOUTS: dict[str, tuple[Callable[[], Any], int]] = {
    "zero 3": (ZeroStrategy, 2),
    "zero 1": (partial(ZeroStrategy, stage=1), 2),
    "zero 2, offloaded": (partial(ZeroStrategy, stage=2, offload=True), 2),
    "tensor parallel": (TensorParallelStrategy, 1),
}


@sampled(1, "layout", LAYOUTS)
def test_they_find_parameters_where_they_keep_them(layout: str) -> None:
    strategy, data_ranks = LAYOUTS[layout]
    one = begun_on_one(trained, "auto")
    for got in run_on_ranks(2, trained, strategy, data_ranks):
        compare(one.result(), got)


class Flat(optim.Optimizer):
    """Steps one vector, of which it makes parameters the parts."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
        vector = nn.utils.parameters_to_vector(parameters) - 0.1 * gradient / gradient.norm()
        nn.utils.vector_to_parameters(vector, parameters)
        return loss


def trained_flat(make_strategy: Callable[[], Any] | str, data_ranks: int = 1) -> Curve:
    model = {"optimizer": Flat, "blocks": 2}
    return train("plain", make_strategy, data_ranks=data_ranks, model=model, data={"samples": 16}, **SHORT)


@sampled(1, "layout", LAYOUTS)
def test_memory_that_they_replace_is_what_is_stored(layout: str) -> None:
    strategy, data_ranks = LAYOUTS[layout]
    one = begun_on_one(trained_flat, "auto")
    for got in run_on_ranks(2, trained_flat, strategy, data_ranks):
        compare(one.result(), got)
