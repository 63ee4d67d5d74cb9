"""Means over targets: over all ranks that share a batch they count by their targets, alone, in sums, and by hand."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_parallel as lp
from lightning_parallel import DataParallel, DataParallelStrategy, HybridStrategy, PipelineParallel, ZeroStrategy
from lightning_parallel.techniques.tools.means import Means, Scale, scaled
from tests.curves import check_parity
from tests.layouts import LAYOUTS as SHARED
from tests.layouts import Layout, hybrid
from tests.models import IGNORED, PlainBlock
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer

PADDED = {"samples": 44, "val_samples": 12, "ignored": 0.6}  # 44 in batches of 8 end with 4
REPEATED = PADDED | {"samples": 17, "val_samples": 9}  # the last of each has one sample for two replicas
RUN = {"data": PADDED, "precision": "64-true", "max_epochs": 1}
LAYOUTS = SHARED | {
    "zero 3 of 4": Layout(4, 4, ZeroStrategy),  # two samples a batch, of which a rank may have no target at all
    "zero 3 of 2 x 2": Layout(4, 4, partial(ZeroStrategy, 2, replicate=2)),
    "layers x data parallel": Layout(4, 2, hybrid(PipelineParallel(2, microbatches=1), DataParallel(2))),
}


def test_loss_functions_count_their_targets() -> None:
    logits, target = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, IGNORED, 2, IGNORED, 4])
    weight, original = torch.arange(1.0, 6.0), torch._C._nn.cross_entropy_loss
    with Means() as means:
        F.cross_entropy(logits, target, label_smoothing=0.1)
        loss = nn.CrossEntropyLoss(weight)(logits, target)
        F.nll_loss(logits, target)
        F.binary_cross_entropy_with_logits(logits, torch.ones(6, 5))
        F.cross_entropy(logits, logits.detach().softmax(-1))
        F.cross_entropy(logits, target, reduction="sum")
        torch.func.vmap(torch.func.grad(lambda x: F.mse_loss(x, torch.zeros(2))))(torch.ones(3, 2))
        nothing = F.cross_entropy(logits, torch.full((6,), IGNORED), label_smoothing=0.1)
    assert [float(mean.count) for mean in means.all] == [4, 1 + 2 + 3 + 5, 4, 30, 6, 0]
    assert torch._C._nn.cross_entropy_loss is original
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, weight))
    nothing.backward()
    assert nothing == 0
    assert not logits.grad.any()


def test_counts_and_scales_keep_their_precision() -> None:
    means = Means()
    means.note(torch.ones(()), torch.tensor(2**24 + 1))
    assert float(means.count) == 2**24 + 1
    x, before = torch.ones((), dtype=torch.float64, requires_grad=True), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as under "bf16-true"
    try:
        scaled(x, Scale(torch.tensor(1 / 3, dtype=torch.float64))).backward()
    finally:
        torch.set_default_dtype(before)
    assert x.grad == 1 / 3


def test_means_by_hand_count_as_told() -> None:
    losses, mask = torch.rand(6, requires_grad=True), torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(lp.mean((losses * mask).sum(), mask.sum()), losses[mask > 0].mean())
    assert lp.mean(losses.sum() * 0, torch.tensor(0)).isnan()  # outside of a step it is a division
    with Means(elements=False) as means:
        lp.mean(losses.sum(), 4)
        nothing = lp.mean((losses * 0).sum(), torch.tensor(0))
        (losses * mask).sum() / mask.sum()  # is not known to be one
    assert [float(mean.count) for mean in means.all] == [4, 0]
    assert nothing == 0  # and not 0 / 0: other parts of the batch may have some
    with pytest.raises(ValueError, match=r"not of shape \(6,\); sum it up"):
        lp.mean(losses, 6)
    x, y = torch.randn(3, 4, 5, requires_grad=True), torch.randint(5, (3, 4))
    with Means() as means:  # losses of which a mean by hand is made count by it only
        beside = F.cross_entropy(x[0], y[0])
        each = [F.cross_entropy(sample, target) for sample, target in zip(x, y, strict=True)]
        loss = lp.mean(torch.stack(each).sum(), 3)
    assert [mean.given for mean in means.all] == [beside, loss]


@sampled(
    1,
    ("column", "layout", "data", "rtol"),
    [
        ("llama", "data parallel", PADDED, 1e-9),
        ("phi3", "zero 3 of 2 x 2", PADDED, 1e-6),  # Hugging Face's own loss, in single precision
        ("llama", "zero 2", PADDED, 1e-9),
        ("llama", "pipeline x data parallel", REPEATED, 1e-6),  # llama's norms compute in single precision
        ("llama", "zero 3", REPEATED, 1e-9),
        ("llama", "tensor x data parallel", PADDED, 1e-9),
    ],
)
def test_padded_labels_train_as_on_one_device(column, layout, data, rtol):
    ranks, readers, strategy = LAYOUTS[layout]
    run = RUN | {"data": data, "model": {"num_hidden_layers": 2}}
    check_parity(column, ranks, strategy, data_ranks=readers, rtol=rtol, **run)


class Heads(LightningModule):
    """As many heads as a rank has samples, each with ignored targets of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(6, 5) for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return sum(F.cross_entropy(h(x), y[:, k], ignore_index=IGNORED) for k, h in enumerate(self.heads))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_heads(strategy: Any, batch_size: int) -> dict[str, Tensor]:
    generator, model = torch.Generator().manual_seed(3), Heads()
    y = torch.randint(5, (24, 4), generator=generator).masked_fill(
        torch.rand(24, 4, generator=generator) < 0.4, IGNORED
    )
    data = TensorDataset(torch.randn(24, 6, generator=generator).double(), y)
    run = trainer(made(strategy), max_epochs=1, precision="64-true")
    run.fit(model, DataLoader(data, batch_size))
    return dict(model.state_dict())


@pytest.mark.exhaustive
def test_heads_as_many_as_samples_count_by_their_targets() -> None:
    assert_like_one_device(of_heads, 2, (None, 8), (DataParallelStrategy, 4), rtol=1e-9, atol=1e-9)


class Sums(LightningModule):
    """Two cross-entropies with other targets and an error over all samples; every way of logging."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.automatic_optimization = way != "manual"
        self.layer, self.heads = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 3), nn.Linear(8, 1)])

    def losses(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, first, second, value = batch
        h = self.layer(x).tanh()
        one, two = F.cross_entropy(self.heads[0](h), first), F.cross_entropy(self.heads[1](h), second)
        error = (self.heads[2](h).squeeze(-1) - value).square().mean()
        return one, one + 0.3 * two + F.l1_loss(h.mean(-1), value) + 2 * error

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Any:
        one, loss = self.losses(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("one", one.detach(), on_step=False, on_epoch=True, batch_size=len(batch[0]))
        if self.way == "manual":
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.log("made", loss / 2 + 3 * one, on_step=True, on_epoch=True)
            self.manual_backward(loss)
            optimizer.step()
            self.log("again", loss, on_step=True, on_epoch=True)  # what made the loss is freed
            return None
        return {"loss": loss, "one": one} if self.way == "dict" else loss

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.log("val_one", self.losses(batch)[0], on_step=True, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.way == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        if self.way == "line search":
            return torch.optim.LBFGS(self.parameters(), lr=1.0, max_iter=3, line_search_fn="strong_wolfe")
        return torch.optim.SGD(self.parameters(), lr=0.1)


def targets(classes: int, random: torch.Generator) -> Tensor:
    made = torch.randint(classes, (22,), generator=random)
    return made.masked_fill(torch.rand(22, generator=random) < 0.5, IGNORED)


class Logged(Callback):
    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_batch_end(trainer)


def train_sums(strategy: Any, ranks: int, way: str, **run: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(22, 4, generator=random, dtype=torch.float64)
    data = TensorDataset(inputs, targets(5, random), targets(3, random), inputs.sum(-1).tanh())
    loader, seen, model = partial(DataLoader, data, 8 // ranks), Logged(), Sums(way)
    trainer(strategy(), precision="64-true", max_epochs=2, callbacks=[seen], **run).fit(model, loader(), loader())
    return seen.values, dict(model.state_dict())


CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


@pytest.mark.filterwarnings("ignore:.*overridden.*")
@sampled(1, "way", ["loss", "dict", "manual", "lbfgs", "line search"])
def test_sums_of_means_train_as_on_one_device(way: str) -> None:
    options = {"rtol": 1e-9, "atol": 1e-9, **(CLIPPED if way == "loss" else {})}
    assert_like_one_device(train_sums, 2, (HybridStrategy, 1, way), (DataParallelStrategy, 2, way), **options)


class Differs(Sums):
    """Another number of losses on rank 1, or no loss at all there."""

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            return loss
        return None if self.way == "none" else loss + F.mse_loss(self.layer(batch[0]), torch.zeros(4, 8))


def train_differing() -> None:
    data = TensorDataset(torch.randn(8, 4), torch.zeros(8).long(), torch.zeros(8).long(), torch.zeros(8))
    trainer(DataParallelStrategy(), max_epochs=1).fit(Differs("loss"), DataLoader(data, 4))
    with pytest.raises(ValueError, match=r"whether a step returns a loss.*rank 0.*rank 1.*returned no loss"):
        trainer(DataParallelStrategy(), max_epochs=1).fit(Differs("none"), DataLoader(data, 4))


@pytest.mark.filterwarnings("ignore")
def test_batch_that_only_one_rank_skips_is_refused_on_all() -> None:
    """Ranks with other numbers of losses train."""
    run_on_ranks(2, train_differing)


VOCABULARY, LENGTH, WIDTH = 11, 8, 8


class ByHand(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.automatic_optimization = way, way != "manual"
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(PlainBlock(WIDTH, 2 * WIDTH) for _ in range(2))

    def loss(self, tokens: Tensor, target: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        weight = self.head.weight
        if self.way == "inside":  # a quotient of the model's own
            weight = weight / (weight.abs().sum() / torch.tensor(weight.numel()))
        logits, counted = F.linear(hidden, weight, self.head.bias), target != 0
        losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        match self.way:
            case "summed":
                summed = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
                return lp.mean(summed, counted.sum())
            case "beside":  # a loss function's mean, and one over other positions
                mean = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=0)
                return mean + 0.5 * lp.mean((logits.square().sum(-1) * (target > 3)).sum(), (target > 3).sum())
            case _:
                return lp.mean((losses * counted).sum(), counted.sum())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        tokens, target = batch
        hits, mask = tokens == target, target != 0
        if self.way != "beside":  # without a graph a sum of means counts by samples, see docs/differences.md
            self.log("loss", self.loss(*batch))
        self.log("accuracy", lp.mean(hits.double().sum(), mask.sum()), on_step=True)
        self.log("percent", lp.mean(100 * hits.sum(), mask.sum()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def padded(readers: int) -> DataLoader[Any]:
    """Batches of 8 samples, the last of 6; one sample in four has no target."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (22, LENGTH), generator=random)
    without = torch.rand(22, LENGTH, generator=random) < 0.6
    without[::4] = True
    return DataLoader(TensorDataset(tokens, tokens.masked_fill(without, 0)), 8 // readers)


def train_by_hand(strategy: Any, readers: int, way: str) -> list[dict[str, float]]:
    seen = Logged()
    run = trainer(strategy(), precision="64-true", max_epochs=2, callbacks=[seen])
    run.fit(ByHand(way), padded(readers), padded(readers))
    return seen.values


@sampled(
    2,
    ("layout", "way"),
    [
        ("pipeline of 4 microbatches", "masked"),
        ("layers x data parallel", "masked"),
        ("pipeline x data parallel", "summed"),
        ("zero 3 of 4", "summed"),
        ("tensor x data parallel", "inside"),
        ("pipeline x tensor", "inside"),
        ("context x data parallel", "masked"),
        ("zero 3 of 4", "beside"),
        ("context", "beside"),
        ("zero 2", "manual"),
    ],
)
def test_means_by_hand_train_and_evaluate_as_on_one_device(layout: str, way: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    one, many = (HybridStrategy, 1, way), (strategy, readers, way)
    assert_like_one_device(train_by_hand, ranks, one, many, rtol=1e-9, atol=1e-12)
