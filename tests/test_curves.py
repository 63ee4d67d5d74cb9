"""Proves the comparison: Lightning's own DDP matches one process, and every kind of difference is named."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, DistributedSampler

from tests.curves import RUN, Curve, compare, curve, reference
from tests.models import COLUMNS, Loaders, build, datasets, loaders
from tests.ranks import run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

ANY_LAYOUT = ("gpt", "llama", "gpt2", "plain")
CURVE = Curve(
    losses=[2.0, 1.0],
    metrics=[{"val_loss": 1.5, "val_accuracy": 0.25}],
    weights={"head.weight": torch.ones(3, 5), "temperature": torch.tensor(1.5)},
)


def in_order(dataset: torch.utils.data.Dataset, batch_size: int) -> DataLoader:
    return DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, shuffle=False))


def train_with_ddp(column: str) -> Curve:
    """DDP shuffles and does not reduce what is logged, unless told otherwise."""
    log = LightningModule.log

    def synced(self: LightningModule, *args: object, **kwargs: object) -> None:
        log(self, *args, **(kwargs | {"sync_dist": True}))

    data = Loaders(*(in_order(dataset, 8 // dist.get_world_size()) for dataset in datasets(column)))
    with mock.patch.object(LightningModule, "log", synced):
        return curve(partial(trainer, "ddp", use_distributed_sampler=False, **RUN), build(column), data)


@sampled(1, "column", ANY_LAYOUT)
def test_ddp_follows_one_process(column: str) -> None:
    for rank, got in enumerate(run_on_ranks(2, train_with_ddp, column)):
        compare(reference(column), got, where=f"rank {rank}: ")


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_learns_in_every_parameter(column: str) -> None:
    start = build(column)
    start.configure_model()
    expected = reference(column)
    assert len(expected.losses) == 6
    assert expected.losses[-1] < expected.losses[0]
    still = [name for name, p in start.named_parameters() if torch.equal(p, expected.weights[name])]
    assert not still


def test_same_seed_makes_same_weights_and_data() -> None:
    first, second, other = (build("plain", seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["stem.weight"], other["stem.weight"])
    torch.testing.assert_close(next(iter(loaders("llama", 4).train)), next(iter(loaders("llama", 4).train)))


def test_reference_is_computed_once() -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    assert reference("plain", model={"optimizer": optimizer}) is reference("plain", model={"optimizer": optimizer})


def changed(path: str, value: object) -> Curve:
    """The curve with `losses.1`, `metrics.0` or `weights.temperature` replaced, or removed where value is None."""
    result = copy.deepcopy(CURVE)
    part, key = path.split(".", 1)
    held = getattr(result, part)
    index = int(key) if isinstance(held, list) else key
    if value is None:
        del held[index]
    else:
        held[index] = value
    return result


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (changed("losses.1", 1.001), r"step 1: train_loss is 1.001, the reference has 1.0"),
        (changed("losses.1", float("nan")), r"step 1: train_loss is nan"),
        (changed("losses.1", None), r"1 step\(s\), the reference has 2"),
        (changed("metrics.0", {"val_loss": 1.5, "val_accuracy": 0.5}), r"epoch 0: val_accuracy is 0.5, .* has 0.25"),
        (changed("metrics.0", {"val_loss": 1.5, "new": 0.5}), r"missing \['val_accuracy'\], not in .* \['new'\]"),
        (changed("weights.temperature", torch.tensor(1.501)), r"weight temperature .* at \[\] is 1.50\d+, .* has 1.5"),
        (changed("weights.temperature", torch.tensor(float("nan"))), r"weight temperature .* is nan"),
        (changed("weights.temperature", None), r"the weights: missing \['temperature'\]"),
        (changed("weights.head.weight", torch.ones(5, 3)), r"\(5, 3\) torch.float32, the reference has \(3, 5\)"),
        (
            changed("weights.head.weight", torch.ones(3, 5).triu(-1)),
            r"of shape \(3, 5\) at \[2, 0\] is 0.0, .* has 1.0",
        ),
    ],
)
def test_differences_are_named(got: Curve, message: str) -> None:
    compare(CURVE, copy.deepcopy(CURVE))
    with pytest.raises(AssertionError, match=message):
        compare(CURVE, got)
