"""Proves the comparison: Lightning's own DDP matches one process, and every kind of difference is named."""

import copy
import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, DistributedSampler

from tests.curves import RUN, Curve, compare, curve, reference
from tests.models import COLUMNS, Loaders, build, datasets
from tests.ranks import run_on_ranks
from tests.trainers import trainer

CURVE = Curve(
    losses=[2.0, 1.0],
    metrics=[{"val_loss": 1.5, "val_accuracy": 0.25}],
    weights={"head.weight": torch.ones(3, 5), "temperature": torch.tensor(1.5)},
)


def train_with_ddp(column: str) -> Curve:
    """DDP shuffles and does not reduce what is logged, unless told otherwise."""
    log = LightningModule.log

    def synced(self: LightningModule, *args: object, **kwargs: object) -> None:
        log(self, *args, **(kwargs | {"sync_dist": True}))

    given, size = datasets(column), 8 // dist.get_world_size()
    data = Loaders(*(DataLoader(each, size, sampler=DistributedSampler(each, shuffle=False)) for each in given))
    with mock.patch.object(LightningModule, "log", synced):
        return curve(partial(trainer, "ddp", use_distributed_sampler=False, **RUN), build(column), data)


def test_ddp_follows_one_process() -> None:
    for rank, got in enumerate(run_on_ranks(2, train_with_ddp, "llama")):
        compare(reference("llama"), got, where=f"rank {rank}: ")


def test_every_column_learns_in_every_parameter() -> None:
    for column in COLUMNS:
        start, expected = build(column), reference(column)
        start.configure_model()
        assert len(expected.losses) == 6
        assert expected.losses[-1] < expected.losses[0]
        assert not [name for name, p in start.named_parameters() if torch.equal(p, expected.weights[name])]


DIFFERENCES = [  # what is replaced in the curve, or removed where the value is None, and what is said of it
    ("losses", 1, 1.001, r"step 1: train_loss is 1.001, the reference has 1.0"),
    ("losses", 1, float("nan"), r"step 1: train_loss is nan"),
    ("losses", 1, None, r"1 step\(s\), the reference has 2"),
    ("metrics", 0, {"val_loss": 1.5, "val_accuracy": 0.5}, r"epoch 0: val_accuracy is 0.5, .* has 0.25"),
    ("metrics", 0, {"val_loss": 1.5, "new": 0.5}, r"missing \['val_accuracy'\], not in .* \['new'\]"),
    ("weights", "temperature", torch.tensor(1.501), r"weight temperature .* at \[\] is 1.50\d+, .* has 1.5"),
    ("weights", "temperature", torch.tensor(float("nan")), r"weight temperature .* is nan"),
    ("weights", "temperature", None, r"the weights: missing \['temperature'\]"),
    ("weights", "head.weight", torch.ones(5, 3), r"\(5, 3\) torch.float32, the reference has \(3, 5\)"),
    ("weights", "head.weight", torch.ones(3, 5).triu(-1), r"of shape \(3, 5\) at \[2, 0\] is 0.0, .* has 1.0"),
]


def test_differences_are_named() -> None:
    compare(CURVE, copy.deepcopy(CURVE))
    for part, key, value, message in DIFFERENCES:
        got = copy.deepcopy(CURVE)
        getattr(got, part).pop(key) if value is None else getattr(got, part).__setitem__(key, value)
        with pytest.raises(AssertionError) as caught:
            compare(CURVE, got)
        assert re.search(message, str(caught.value))
