"""What a step keeps on its module: noticed, taken back, put together for the batch, kept on every rank."""

import copy
from collections import defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_parallel.strategies.logged.kept.merged import Merging, Part
from lightning_parallel.strategies.logged.kept.values import KeptValues, keep
from lightning_parallel.strategies.logged.kind_watch import KindWatch
from lightning_parallel.strategies.logged.kinds import Kind
from lightning_parallel.values import map_leaves
from tests.strategies.one_and_two import require_like

X = torch.arange(24.0).view(8, 3) / 7


class Meter:
    """As users write them, to have the average of what it is given."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, samples: int) -> None:
        self.total, self.count = self.total + value * samples, self.count + samples


@dataclass
class Record:
    losses: list[Any] = field(default_factory=list)
    seen: int = 0


class Keeper(LightningModule):
    """Keeps values in all the ways that users do."""

    def __init__(self) -> None:
        super().__init__()
        self.dicts: list[Any] = []
        self.by_loader: Any = defaultdict(list)
        self.nested: Any = {"a": {"b": []}, "n": [[], [[]]]}
        self.meter, self.record, self.space = Meter(), Record(), SimpleNamespace(hits=0, rows=[])
        self.recent: Any = deque(maxlen=3)
        self.names: set[str] = set()
        self.arrays: list[Any] = []
        self.hits, self.total, self.steps = 0, 0.0, 0
        self.matrix, self.table = torch.zeros(2), np.zeros(2)
        self.flat: list[Any] = []
        self.counts: list[int] = []
        self.replaced: list[Any] = []
        self.cache: dict[int, float] = {}
        self.pairs: list[Any] = []
        self.last: Any = None

    def step(self, x: Tensor) -> None:
        mean, hits = x.square().mean(), (x.sum(1) > 3).sum()
        self.dicts.append({"loss": mean, "preds": x.argmax(-1), "hits": hits, "count": hits.item()})
        self.by_loader[0].append({"loss": mean, "rows": x})
        self.nested["a"]["b"].append((mean, x))
        self.nested["n"][1][0].append(mean)
        self.meter.update(mean.item(), len(x))
        self.record.losses.append(mean)
        self.record.seen += len(x)
        self.space.hits += hits.item()
        self.space.rows.append(x[:, 0].numpy())
        self.recent.append(mean)
        self.names |= {f"row {row}" for row in x[:, 0].tolist()}
        self.arrays.append(x.numpy())
        self.hits += hits.item()
        self.total += mean.item() * x.size(0)
        self.steps += 1
        self.matrix += torch.bincount((x.sum(1) > 3).long(), minlength=2)
        self.flat.append(x.flatten())
        self.counts.append(hits.item())
        self.replaced = [mean, hits]
        self.cache.update({round(float(row) * 7): float(row) for row in x[:, 0]})
        self.pairs.extend([mean, hits])
        self.last = {"loss": mean, "highest": x.max(), "codes": [101, 102, 103]}


def kept_in_parts(module: Keeper, sizes: list[int], other: Keeper, adding: set[Any]) -> set[Any]:
    """Runs the step on parts of the samples; what it kept is put together on the module and on another rank's."""
    before, parts = KeptValues(module), []
    for x in torch.split(X, sizes):
        with KindWatch() as watch:
            watch.take_as_same(before.tensors())
            module.step(x)
            changes, stay = before.changes()
        assert not stay
        kinds = {}
        for path, change in changes.items():
            leaves: list[Any] = []
            map_leaves(leaves.append, change.value)
            number = isinstance(change.before, (int, float))
            seen = [watch.kind_of_number(change.value, change.before)] if number else [*map(watch.kind_of, leaves)]
            kinds[path] = seen
        before.undo()
        parts.append(Part(len(x), len(x) / len(X), (), changes, kinds, watch.doubtful))
    merging = Merging(parts, adding)
    merged = merging.merged()
    keep(module, merged)
    keep(other, copy.deepcopy(merged))
    return merging.guessed


def everything(module: Keeper) -> dict[str, Any]:
    kept = {name: value for name, value in vars(module).items() if name in vars(Keeper()) and name[0] != "_"}
    kept = {name: value for name, value in kept.items() if name not in ("training", "prepare_data_per_node")}

    def plain(value: Any) -> Any:
        if isinstance(value, (Meter, Record, SimpleNamespace)):
            value = vars(value)
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, set):
            return [float(name[4:]) for name in sorted(value)]
        if isinstance(value, (list, tuple, deque)):
            return [plain(item) for item in value]
        return torch.as_tensor(value) if isinstance(value, np.ndarray) else value

    return {name: plain(value) for name, value in kept.items()}


@pytest.mark.parametrize("sizes", [[4, 4], [3, 3, 2], [2, 2, 2, 2], [1] * 8, [8]], ids=str)
def test_what_parts_keep_is_what_the_batch_would_have_kept(sizes: list[int]) -> None:
    whole, module, other = Keeper(), Keeper(), Keeper()
    adding: set[Any] = set()
    for _ in range(3):
        whole.step(X)
        guessed = kept_in_parts(module, sizes, other, adding)
        told = {"total", "steps", "meter", "record"} if max(sizes) == 1 else set()  # by one sample nobody can tell
        assert {path[0] for path in guessed} <= told | {"dicts", "counts"}  # equal counts may be something else
        for found in (everything(module), everything(other)):
            for name, expected in everything(whole).items():
                if name not in told:
                    require_like({name: expected}, {name: found[name]})


class Scaled(Keeper):
    def step(self, x: Tensor) -> None:
        self.last = {"loss": (mean := x.square().sum() / x.size(0)), "scaled": 2 * mean}


def test_a_mean_times_a_number_that_is_like_a_count_is_told() -> None:
    """With parts of two samples it may be a sum over them as well."""
    guessed = kept_in_parts(Scaled(), [2] * (len(X) // 2), Scaled(), set())
    assert {path[0] for path in guessed} == {"last"}


def of_each(z: Tensor) -> Tensor:
    return torch.stack([z[i].abs().sum() + z[i].square().mean() for i in range(len(z))]).mean()


def of_each_row(z: Tensor) -> Tensor:
    return torch.stack([(row * 2).sum() for row in z]).max()


def one_by_one(z: Tensor) -> Tensor:
    total = torch.zeros(())
    for row in z.unbind():
        total = total + row.sum()
    return total


def divided_one_by_one(z: Tensor) -> Tensor:
    return sum(z[i].exp().sum() / len(z) for i in range(len(z)))  # type: ignore[return-value]


def listed(z: Tensor) -> Tensor:
    losses = [row.square().mean() for row in z]
    return 0.5 * sum(losses) / len(losses)  # type: ignore[return-value]


def stacked(z: Tensor) -> Tensor:
    losses = [row.square().mean() for row in z.unbind()]
    return torch.stack(losses).sum() / len(losses)


def last_layer(z: Tensor) -> Tensor:
    return z.expand(2, *z.shape)[-1].sum()


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (of_each, Kind.MEAN),
        (of_each_row, Kind.MAX),
        (one_by_one, Kind.SUM),
        (divided_one_by_one, Kind.MEAN),
        (listed, Kind.MEAN),
        (stacked, Kind.MEAN),
        (last_layer, Kind.SUM),
        (lambda z: z[-1].sum(), Kind.OTHER),
    ],
)
def test_what_a_loop_over_samples_makes_is_known(made: Any, kind: Kind) -> None:
    for samples in (3, 4):
        z = torch.randn(samples, 5)
        with KindWatch() as watch:
            watch.samples = samples
            value = made(z)
        assert watch.kind_of(value) is kind


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda z, w: (z * (w / w.sum())).sum(), Kind.MEAN),
        (lambda z, w: (-z * w / w.sum().clamp(min=1)).sum(), Kind.MEAN),
        (lambda z, w: torch.dot(z.flatten(), (w / w.sum()).flatten()), Kind.MEAN),
        (lambda z, w: (z * w.flatten().softmax(0).view_as(z)).sum(), Kind.MEAN),
        (lambda z, w: (z * F.normalize(w, p=1, dim=0)).sum(), Kind.MEAN),
        (lambda z, w: (z / z.numel()).sum(), Kind.MEAN),
        (lambda z, w: (z / len(z)).sum(), Kind.MEAN),
        (lambda z, w: (z * w.softmax(1)).sum(), Kind.SUM),
        (lambda z, w: (z * (w / w.sum(1, keepdim=True))).sum(), Kind.SUM),
        (lambda z, w: (z / 7).sum(), Kind.SUM),
        (lambda z, w: (z / z.max()).exp().sum(), Kind.SUM),
        (lambda z, w: (z * (w / w.sum())).mean(), Kind.OTHER),
    ],
)
def test_weights_that_add_up_to_one_make_means_of_sums(made: Any, kind: Kind) -> None:
    z, weights = torch.randn(6, 5), torch.rand(6, 5)
    with KindWatch() as watch:
        value = made(z, weights)
    assert watch.kind_of(value) is kind


@pytest.mark.parametrize("doubtful", [True, False])
def test_a_sum_times_a_number_that_is_like_one_over_a_count_is_doubtful(doubtful: bool) -> None:
    z = torch.randn(6, 5)
    with KindWatch() as watch:
        value = z.sum() * (1 / z.numel() if doubtful else 1 / 7)
    assert watch.doubtful is doubtful
    assert watch.kind_of(value) is Kind.SUM


def test_a_list_of_one_sample_may_be_one_of_all() -> None:
    """A microbatch may have one: whether what it makes is a mean over samples cannot be seen."""
    z = torch.randn(1, 5)
    with KindWatch() as watch:
        watch.samples = 1
        value = of_each(z)
    assert watch.kind_of(value) is Kind.OTHER


@dataclass
class Pair:
    one: Tensor
    other: Tensor


@dataclass
class Single:
    only: Tensor


@pytest.mark.parametrize("value", [Pair(X.clone(), X.clone()), Single(X.clone())])
def test_what_has_tensors_is_copied_while_a_step_is_watched(value: Any) -> None:
    """Torch tells the watch of a copy that is half made."""
    with KindWatch():
        copied = copy.deepcopy(value)
    assert all(map(torch.equal, vars(copied).values(), vars(value).values()))
