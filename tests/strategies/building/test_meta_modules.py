"""Modules that the user built on meta are made by their own `reset_parameters`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.strategies.build import MetaModules
from tests.strategies.building.built_modules import CPU, named_tensors


class Counted(nn.Module):
    """Holds a buffer that nothing sets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def reset(module: nn.Module) -> dict[str, Tensor]:
    made = ((entries, value.clone()) for entries, value in MetaModules(module).reset(CPU))
    return {entry.path: value for entries, value in made for entry in entries}


def test_parents_have_the_last_word_and_ties_are_one_tensor() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4), nn.MultiheadAttention(4, 2))
    module[1].weight = module[0].weight
    module[1].bias = nn.Parameter(torch.full((4,), 2.0))  # has values, and is left alone
    tensors = reset(module)
    assert torch.equal(tensors["0.weight"], tensors["1.weight"])
    assert not tensors["2.out_proj.bias"].any()
    assert "1.bias" not in tensors


def test_tensors_without_values_are_refused() -> None:
    builds: dict[str, Callable[[], nn.Module]] = {
        r"'0.count' is on meta, and 0 \(Counted\) has no reset_parameters\(\) that sets it; give it": Counted,
        "original0' is on meta": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        r"'0.0' is on meta, and 0 \(ParameterList\)": lambda: nn.ParameterList([torch.empty(2)]),
    }
    for message, build in builds.items():
        with torch.device("meta"):
            module = nn.Sequential(build())
        with pytest.raises(TypeError, match=message):
            reset(module)
        assert all(tensor.is_meta for tensor in named_tensors(module).values())
