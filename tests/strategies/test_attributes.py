"""Snapshots of a module's attributes: what a step changed in them, repeated on another rank, or undone."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parallel.strategies.attributes import Attributes
from lightning_parallel.values import map_tensors
from tests.strategies.one_and_two import require_like


@dataclass
class Record:
    losses: list[Any] = field(default_factory=list)
    seen: int = 0


class Keeper(LightningModule):
    """Keeps values in all the ways that users do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.losses: list[Any] = []
        self.recent: Any = deque(maxlen=2)
        self.steps, self.total, self.last = 0, 0.0, torch.zeros(3)
        self.matrix, self.table = torch.zeros(2), np.zeros(2)
        self.nested: Any = {"a": {"b": []}, "n": [[], [[]]]}
        self.record, self.space = Record(), SimpleNamespace(hits=0)
        self.names: set[str] = set()

    def sets_and_appends(self, x: Tensor) -> None:
        self.losses += [{"loss": x.mean(), "rows": x}, x.tolist()]
        self.recent.append(float(x.detach().sum()))
        self.steps, self.total, self.last = self.steps + 1, self.total + float(x.detach().sum()), x.amax(0)
        self.made = 5.0
        self.matrix += 1
        self.table[0] += 1

    def changes_deeper(self, x: Tensor) -> None:
        self.nested["a"]["b"].append(x)
        self.nested["n"][1][0].append(1)
        self.record.losses.append(float(x.detach().sum()))
        self.record.seen += 1
        self.space.hits += 1
        self.names.add(str(float(x.detach().sum())))


def everything(module: Keeper) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if name in {**vars(Keeper()), "made": None}}
    own = {name: value for name, value in own.items() if name not in vars(LightningModule())}
    own |= {"record": vars(module.record), "space": vars(module.space), "table": torch.from_numpy(module.table)}
    plain = {name: list(value) if isinstance(value, deque) else value for name, value in own.items()}
    plain["names"] = [float(name) for name in sorted(module.names)]
    return copy.deepcopy(map_tensors(Tensor.detach, plain))  # type: ignore[no-any-return]


def test_what_was_set_and_appended_is_repeated_on_another_rank() -> None:
    module, other = Keeper(), Keeper()
    for number in range(3):
        before, x = Attributes(module), torch.full((2, 3), float(number), requires_grad=True)
        module.sets_and_appends(x)
        changes, others = before.changes()
        assert not others
        for name, change in pickle.loads(pickle.dumps({name: each.packed() for name, each in changes.items()})).items():
            change.repeat(other, name, torch.device("cpu"))
        require_like(everything(module), everything(other))
    assert len(other.losses) == 6
    assert not other.losses[0]["rows"].requires_grad


@pytest.mark.parametrize("step", [Keeper.sets_and_appends, Keeper.changes_deeper])
def test_everything_is_undone_in_the_same_objects(step: Any) -> None:
    module = Keeper()
    step(module, torch.ones(2, 3))
    before, expected, lists = Attributes(module), everything(module), [module.losses, module.nested["a"]["b"]]
    step(module, torch.full((2, 3), 2.0))
    module.new = 1
    before.undo()
    require_like(expected, everything(module))
    assert not hasattr(module, "new")
    assert module.losses is lists[0]
    assert module.nested["a"]["b"] is lists[1]


def test_deeper_changes_and_what_cannot_be_sent_are_named() -> None:
    module = Keeper()
    before = Attributes(module)
    module.changes_deeper(torch.ones(2, 3))
    module.last = lambda: None  # type: ignore[assignment]
    module.steps = 4
    changes, others = before.changes()
    assert list(changes) == ["steps"]
    assert sorted(others) == ["last", "names", "nested", "record", "space"]
    assert Attributes(module).changes() == ({}, [])
