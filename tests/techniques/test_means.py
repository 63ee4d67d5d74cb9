"""Means over targets: over all ranks that share a batch they count by their targets, alone and in sums."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    DataParallel,
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    TensorParallel,
    ZeroStrategy,
)
from lightning_parallel.techniques.tools.means import Means, Scale, scaled
from tests.curves import check_parity, reference, train
from tests.models import IGNORED
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

PADDED = {"samples": 44, "val_samples": 12, "ignored": 0.6}  # 44 in batches of 8 end with 4
RUN = {"data": PADDED, "precision": "64-true", "max_epochs": 1}


# -------------------------------------------------------------------- what a step computes


def test_counts_of_loss_functions() -> None:
    logits, target = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, IGNORED, 2, IGNORED, 4])
    weight = torch.arange(1.0, 6.0)
    original = torch._C._nn.cross_entropy_loss
    with Means() as means:
        losses = [
            F.cross_entropy(logits, target, label_smoothing=0.1),
            nn.CrossEntropyLoss(weight)(logits, target),
            F.nll_loss(logits, target),
            F.mse_loss(logits, torch.zeros(6, 5)),
            F.binary_cross_entropy_with_logits(logits, torch.ones(6, 5)),
            F.cross_entropy(logits, logits.detach().softmax(-1)),
        ]
        F.cross_entropy(logits, target, reduction="sum")
    assert [float(mean.count) for mean in means.all] == [4, 1 + 2 + 3 + 5, 4, 30, 30, 6]
    assert torch._C._nn.cross_entropy_loss is original
    torch.testing.assert_close(losses[0], F.cross_entropy(logits, target, label_smoothing=0.1))
    torch.testing.assert_close(losses[1], F.cross_entropy(logits, target, weight))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_over_no_target_at_all_there_is_no_loss_and_no_gradient(label_smoothing: float) -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    with Means():
        loss = F.cross_entropy(logits, torch.full((3,), IGNORED), label_smoothing=label_smoothing)
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


def test_counts_stay_exact_beyond_single_precision() -> None:
    means = Means()
    means.note(torch.ones(()), torch.tensor(2**24 + 1))
    assert float(means.count) == 2**24 + 1


def test_scale_to_a_mean_has_the_precision_of_the_gradient() -> None:
    x = torch.ones((), dtype=torch.float64, requires_grad=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as under "bf16-true"
    try:
        scaled(x, Scale.to_mean(3, x.device)).backward()
    finally:
        torch.set_default_dtype(before)
    assert x.grad == 1 / 3
    assert Scale.to_mean(0, x.device).factor == 0


def test_each_mean_of_a_sum_has_its_own_scale() -> None:
    x = torch.ones(2, requires_grad=True)
    with Means() as means:
        loss = 3 * F.mse_loss(x[:1], torch.zeros(1)) + F.l1_loss(x[1:], torch.zeros(1)) / 2 + x.sum()
    assert means.parts_of(loss) == {means.all[0]: 3.0, means.all[1]: 0.5}
    means.all[0].scale.factor, means.all[1].scale.factor = torch.tensor(10.0), torch.tensor(100.0)
    loss.backward()
    assert x.grad.tolist() == [61.0, 51.0]


def test_mean_is_known_detached_and_changed_in_place() -> None:
    x = torch.full((2,), 2.0, requires_grad=True)
    with Means() as means:
        loss = F.mse_loss(x, torch.zeros(2))
        assert means.parts_of(loss.detach()) == {means.all[0]: 4.0}
        loss += x.sum()
        assert means.parts_of(loss) == {means.all[0]: 4.0}
        assert means.parts_of(loss.exp()) == means.parts_of(nn.Parameter(torch.ones(()))) == {}


def test_transforms_of_functions_are_left_alone() -> None:
    with Means() as means:
        each = torch.func.vmap(torch.func.grad(lambda x: F.mse_loss(x, torch.zeros(2))))(torch.ones(3, 2))
    assert each.tolist() == [[1.0, 1.0]] * 3
    assert not means.all


def test_loss_counts_by_the_means_that_it_is_made_of() -> None:
    logits, target = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, IGNORED, 2, IGNORED, 4])
    with Means(elements=False) as means:
        loss = F.cross_entropy(logits, target)
        F.cross_entropy(logits[:3], target[:3])  # which is only looked at
        F.cross_entropy(logits.detach(), target)
    means.returned((2 * loss).exp())
    assert means.count == 4
    means.returned(logits.square().mean())
    assert means.count is None


class Heads(LightningModule):
    """As many heads as a rank has samples, each with ignored targets of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(6, 5) for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return sum(F.cross_entropy(h(x), y[:, k], ignore_index=IGNORED) for k, h in enumerate(self.heads))  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_heads(strategy: Any, batch_size: int) -> dict[str, Tensor]:
    generator, model = torch.Generator().manual_seed(3), Heads()
    y = torch.randint(5, (24, 4), generator=generator).masked_fill(
        torch.rand(24, 4, generator=generator) < 0.4, IGNORED
    )
    data = TensorDataset(torch.randn(24, 6, generator=generator).double(), y)
    run = trainer("auto" if strategy is None else strategy(), max_epochs=1, precision="64-true")
    run.fit(model, DataLoader(data, batch_size))
    return dict(model.state_dict())


def test_as_many_heads_as_samples_count_by_their_targets() -> None:
    expected = begun_on_one(of_heads, None, 8)
    for found in run_on_ranks(2, of_heads, DataParallelStrategy, 4):
        for name, weight in expected.result().items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-9)


# -------------------------------------------------------------------- whole curves


def pipelines_of_replicas() -> HybridStrategy:
    return HybridStrategy(PipelineParallel(2), DataParallel(2))


def tensors_of_replicas() -> HybridStrategy:
    return HybridStrategy(TensorParallel(2), DataParallel(2))


def check_padded(n: int, strategy: Any, column: str = "llama", data_ranks: int | None = None, rtol: float = 1e-9):
    sizes = {"n_layer": 2} if column == "gpt2" else {"num_hidden_layers": 2}
    check_parity(column, n, strategy, data_ranks=data_ranks or n, rtol=rtol, model=sizes, **RUN)


@pytest.mark.parametrize("strategy", [DataParallelStrategy, partial(ZeroStrategy, stage=2)])
def test_padded_labels_train_as_on_one_device(strategy):
    check_padded(2, strategy)


def test_padded_labels_in_a_pipeline_of_replicas():
    check_padded(4, pipelines_of_replicas, data_ranks=2, rtol=1e-6)  # llama's norms compute in single precision


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("n", "strategy"),
    [
        (2, partial(ZeroStrategy, stage=1)),
        (2, partial(ZeroStrategy, stage=3)),
        (4, partial(ZeroStrategy, 2, replicate=2)),
        (4, DataParallelStrategy),
    ],
)
@pytest.mark.parametrize(("column", "rtol"), [("llama", 1e-9), ("phi3", 1e-6)])
def test_padded_labels_train_as_on_one_device_everywhere(n, strategy, column, rtol):
    check_padded(n, strategy, column, rtol=rtol)  # phi3: Hugging Face's own loss, in single precision


@pytest.mark.exhaustive
def test_padded_labels_under_tensor_parallel_of_replicas():
    check_padded(4, tensors_of_replicas, data_ranks=2)


@pytest.mark.exhaustive
def test_repeated_batch_in_a_pipeline_of_replicas_counts_nothing():
    data = PADDED | {"samples": 17, "val_samples": 9}  # the last of each has one sample for two replicas
    sizes = {"num_hidden_layers": 2}
    check_parity("llama", 4, pipelines_of_replicas, data_ranks=2, rtol=1e-6, model=sizes, **(RUN | {"data": data}))


@pytest.mark.exhaustive
def test_rank_that_only_repeats_a_batch_counts_nothing():
    check_parity(
        "llama", 2, DataParallelStrategy, data_ranks=2, rtol=1e-9, **(RUN | {"data": PADDED | {"samples": 17}})
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", [DataParallelStrategy, partial(ZeroStrategy, stage=2)])
def test_padded_labels_in_mixed_precision_train_as_on_one_device(strategy):
    run = {"data_ranks": 1, "model": {"num_hidden_layers": 2}, **RUN, "precision": "bf16-mixed"}
    expected = reference("llama", **run)
    for got in run_on_ranks(2, train, "llama", strategy, **(run | {"data_ranks": 2})):
        assert got.losses == pytest.approx(expected.losses, rel=2e-2)


# -------------------------------------------------------------------- sums of losses, and every way to use them


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


def train_sums(way: str, strategy: Any, ranks: int, **run: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(22, 4, generator=random, dtype=torch.float64)
    data = TensorDataset(inputs, targets(5, random), targets(3, random), inputs.sum(-1).tanh())
    loader, seen, model = partial(DataLoader, data, 8 // ranks), Logged(), Sums(way)
    trainer(strategy(), precision="64-true", max_epochs=2, callbacks=[seen], **run).fit(model, loader(), loader())
    return seen.values, model.state_dict()


@pytest.mark.filterwarnings("ignore:.*overridden.*")
@sampled(
    1,
    ("way", "run"),
    [
        ("loss", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        ("dict", {}),
        ("manual", {}),
        ("lbfgs", {}),
        ("line search", {}),
    ],
)
def test_sums_of_means_train_as_on_one_device(way, run):
    begun = begun_on_one(train_sums, way, HybridStrategy, 1, **run)
    for got, trained in run_on_ranks(2, train_sums, way, DataParallelStrategy, 2, **run):
        wanted, weights = begun.result()
        for number, (one, two) in enumerate(zip(wanted, got, strict=True)):
            assert two == pytest.approx(one, rel=1e-9), f"step {number}"
        for name, weight in weights.items():
            torch.testing.assert_close(trained[name], weight, rtol=1e-9, atol=1e-12)


def train_scaled(strategy: Any, ranks: int) -> list[float]:
    torch.manual_seed(0)
    inputs, random = torch.randn(22, 4), torch.Generator().manual_seed(1)
    data = TensorDataset(inputs, targets(5, random), targets(3, random), inputs.sum(-1).tanh())
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    seen = Logged()
    trainer(strategy(), plugins=[plugin], max_epochs=3, callbacks=[seen], limit_val_batches=0).fit(
        Sums("loss"), DataLoader(data, 8 // ranks)
    )
    return [values["train_loss"] for values in seen.values]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*val_dataloader.*")
@pytest.mark.parametrize("strategy", [DataParallelStrategy, partial(ZeroStrategy, stage=2)])
def test_sums_of_means_under_a_scaler_train_as_on_one_device(strategy):
    wanted = run_on_ranks(1, train_scaled, HybridStrategy, 1)[0]
    for got in run_on_ranks(2, train_scaled, strategy, 2):
        assert got == pytest.approx(wanted, rel=2e-3)


# -------------------------------------------------------------------- ranks whose steps differ


class Differs(Sums):
    """Another number of losses on rank 1, or no loss at all there."""

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 0:
            return loss
        return None if self.way == "none" else loss + F.mse_loss(self.layer(batch[0]), torch.zeros(4, 8))


def train_differing(way: str) -> None:
    data = TensorDataset(torch.randn(8, 4), torch.zeros(8).long(), torch.zeros(8).long(), torch.zeros(8))
    trainer(DataParallelStrategy(), max_epochs=1).fit(Differs(way), DataLoader(data, 4))


@pytest.mark.filterwarnings("ignore")
def test_batch_that_only_one_rank_skips_is_an_error_on_all():
    run_on_ranks(2, train_where_one_skips)


def train_where_one_skips() -> None:
    with pytest.raises(ValueError, match=r"whether a step returns a loss.*rank 0.*rank 1.*returned no loss"):
        train_differing("none")


@pytest.mark.filterwarnings("ignore")
def test_ranks_with_other_numbers_of_losses_train_and_are_told(caplog):
    run_on_ranks(2, train_differing, "loss")
