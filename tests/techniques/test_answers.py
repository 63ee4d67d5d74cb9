"""What a look in shapes answers where code asks for more than shapes: hooks on activations, quantiles."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.techniques.test_trace import WIDTH, Model, look, plain


class Does(nn.Linear):
    """Does something with what it computes."""

    def __init__(self, act: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        found = self.act(y)
        return y if found is None else y + found.view(-1, 1)


def hooked(y: Tensor) -> None:
    y.register_hook(lambda gradient: gradient * 0.5).remove()
    y.register_hook(torch.zeros_like)


@pytest.mark.parametrize("act", [hooked, lambda y: y.retain_grad()])
def test_hooks_on_activations_of_blocks(act: Callable[[Tensor], None]) -> None:
    assert look(Model(lambda: Does(act)), plain).complete


QUANTILES: list[Callable[[Tensor], Tensor]] = [
    lambda y: torch.quantile(y, 0.9, dim=-1),
    lambda y: torch.quantile(y, q=0.5, dim=-1, interpolation="lower"),
    lambda y: y.quantile(0.9, dim=-1, keepdim=True),
    lambda y: torch.nanquantile(y, 1, dim=-1),
    lambda y: torch.quantile(input=y, q=0.9, dim=-1),
    lambda y: torch.quantile(y, torch.tensor([0.1]), dim=-1),
]


@pytest.mark.parametrize("act", QUANTILES)
def test_quantiles_in_blocks(act: Callable[[Tensor], Tensor]) -> None:
    assert look(Model(lambda: Does(act)), plain).complete
