"""Modules that the user built on meta are made by their own `reset_parameters`."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.strategies.build import MetaModules
from tests.strategies.builds import CPU, assert_same, named_tensors, seed


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


def test_orphans_are_made_by_their_modules_and_stay_on_meta() -> None:
    with torch.device("meta"):
        module = nn.Sequential(
            nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.LSTM(4, 4), nn.Embedding(4, 4, 1)
        )
    before = named_tensors(module)
    seed()
    tensors = reset(module)
    assert all(tensor is before[name] for name, tensor in named_tensors(module).items())
    assert not any(tensor.is_meta for tensor in tensors.values())
    seed()
    with torch.device("cpu"):
        ordinary = nn.Sequential(
            nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.LSTM(4, 4), nn.Embedding(4, 4, 1)
        )
    assert_same(named_tensors(ordinary), tensors)


def test_orphan_has_the_last_word_on_its_children() -> None:
    with torch.device("meta"):
        module = nn.ModuleList([nn.MultiheadAttention(4, 2)])
    assert not reset(module)["0.out_proj.bias"].any()


def test_tied_orphans_are_one_tensor() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
    module[1].weight = module[0].weight
    tensors = reset(module)
    assert torch.equal(tensors["0.weight"], tensors["1.weight"])


def test_orphans_may_hold_shards_when_they_are_made() -> None:
    module = nn.Linear(4, 4, device="meta")
    orphans = MetaModules(module)
    module.weight = shard = nn.Parameter(torch.zeros(2, 4))
    shapes = {entries[0].path: value.shape for entries, value in orphans.reset(CPU)}
    assert shapes["weight"] == (4, 4)
    assert module.weight is shard


def test_tensors_with_values_are_left_alone() -> None:
    module = nn.Linear(4, 4, device="meta")
    module.bias = nn.Parameter(torch.full((4,), 2.0))
    assert set(reset(module)) == {"weight"}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Counted, r"'0.count' is on meta, and 0 \(Counted\) has no reset_parameters\(\) that sets it; give it"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "original0' is on meta"),
        (lambda: nn.ParameterList([torch.empty(2)]), r"'0.0' is on meta, and 0 \(ParameterList\)"),
    ],
)
def test_orphan_without_values_is_refused(build: Callable[[], nn.Module], message: str) -> None:
    with torch.device("meta"):
        module = nn.Sequential(build())
    with pytest.raises(TypeError, match=message):
        reset(module)
    assert all(tensor.is_meta for tensor in named_tensors(module).values())
