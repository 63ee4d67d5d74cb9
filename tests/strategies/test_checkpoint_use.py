"""What users do with checkpoints: hooks, callbacks, loading without a Trainer, and failures while saving."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from lightning_parallel.strategies.named import (
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from tests.checkpoint.folders import load
from tests.models import Plain, loaders
from tests.ranks import RanksFailed, begun_on_one, run_on_ranks
from tests.tiers import covering
from tests.trainers import trainer

LAYOUTS: dict[str, Callable[[], Any]] = {
    "data_parallel": partial(DataParallelStrategy, 2),
    "zero_1": partial(ZeroStrategy, 2, stage=1),
    "zero_3": partial(ZeroStrategy, 2, stage=3),
}


class Tied(LightningModule):
    """Tied weights, buffers, a metric that is saved, hyperparameters, and hooks that edit the checkpoint."""

    def __init__(self, width: int = 6, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, width), nn.Linear(width, 9, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.metric = MeanMetric()
        self.metric.persistent(True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.head(self.table(batch[0])), batch[0])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        loss = self.loss(batch)
        self.metric.update(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def saved(path: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint of either form."""
    return (load(path) if path.is_dir() else torch.load(path, weights_only=True))["state_dict"]


class SaveHalfway(Callback):
    """Saves within an epoch, and says what the metric has seen in all by its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0.0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, idx: int) -> None:
        if idx == 0 and not self.path.exists():
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.end = float(module.metric.compute())


class Editing(Tied):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = "written"
        checkpoint["state_dict"]["table.weight"] = checkpoint["state_dict"]["table.weight"] + 1

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["note"] == "written"
        checkpoint["state_dict"]["table.weight"] = checkpoint["state_dict"]["table.weight"] * 2
        checkpoint["state_dict"]["head.weight"] = checkpoint["state_dict"]["table.weight"]


def tokens() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(16) % 9), 4)


def fitted(make: Callable[[], Any], model: LightningModule, **run: Any) -> Trainer:
    for said in (
        "exists and is not empty",
        "called without a model",
        "multiple `ModelCheckpoint`",
        "no last checkpoint",
    ):
        warnings.filterwarnings("ignore", f".*{said}")
    made = trainer(make(), **({"max_epochs": 1} | run))
    made.fit(model, tokens(), tokens())
    return made


def edited(make: Callable[[], Any], path: Path) -> None:
    model = Editing()
    run = fitted(make, model)
    run.save_checkpoint(path)
    weight = model.table.weight.detach().clone()
    torch.testing.assert_close(saved(path)["table.weight"], weight + 1)
    again = Editing()
    trainer(make()).validate(again, tokens(), ckpt_path=path, verbose=False)
    torch.testing.assert_close(again.table.weight, 2 * (weight + 1))
    assert again.head.weight is again.table.weight
    assert again.steps == model.steps > 0


def read_by_anyone(make: Callable[[], Any], path: Path) -> None:
    model = Tied(width=5, lr=0.2)
    run = fitted(make, model)
    run.save_checkpoint(path)
    run.save_checkpoint(path.with_suffix(".weights"), weights_only=True)
    loaded = Tied.load_from_checkpoint(path, lr=0.3, weights_only=True)
    assert (loaded.hparams.width, loaded.hparams.lr) == (5, 0.3)
    assert torch.equal(loaded.head.weight, model.head.weight)
    assert loaded.steps == model.steps
    assert "optimizer_states" not in torch.load(path.with_suffix(".weights"), weights_only=True)
    (result,) = trainer(make()).test(Tied(width=5), tokens(), ckpt_path=path.with_suffix(".weights"), verbose=False)
    assert result["test_loss"] == pytest.approx(sum(model.loss(batch) for batch in tokens()).item() / 4, rel=1e-5)


def metrics_go_on(make: Callable[[], Any], path: Path) -> None:
    """A metric that is saved holds what all ranks have seen, as on one device."""
    whole, rest = SaveHalfway(path), SaveHalfway(path)
    fitted(make, Tied(), callbacks=[whole])
    assert saved(path)["metric.weight"] == 2.0
    model = Tied()
    trainer(make(), max_epochs=1, callbacks=[rest]).fit(model, tokens(), tokens(), ckpt_path=path)
    assert rest.end == pytest.approx(whole.end, rel=1e-6)


def not_strict(make: Callable[[], Any], path: Path) -> None:
    class Grown(Tied):
        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.full((3,), 7.0))

    model = Tied()
    fitted(make, model).save_checkpoint(path)
    grown = Grown()
    trainer(make()).validate(grown, tokens(), ckpt_path=path, verbose=False)
    torch.testing.assert_close(grown.table.weight, model.table.weight)
    assert grown.extra.tolist() == [7.0] * 3
    Grown.strict_loading = True
    with pytest.raises(RuntimeError, match=r"Missing key.* \"extra\""):
        trainer(make()).validate(Grown(), tokens(), ckpt_path=path, verbose=False)


@covering(keep=1, use=(edited, metrics_go_on, not_strict), layout=LAYOUTS)
def test_use_of_sharded_ones(use: Callable[..., None], layout: str, tmp_path: Path) -> None:
    run_on_ranks(2, use, partial(LAYOUTS[layout], checkpoint="sharded"), tmp_path / "file.ckpt")


@covering(keep=1, use=(edited, read_by_anyone, metrics_go_on, not_strict), layout=LAYOUTS)
def test_use(use: Callable[..., None], layout: str, tmp_path: Path) -> None:
    run_on_ranks(2, use, LAYOUTS[layout], tmp_path / "file.ckpt")


class Unwritable:
    def __reduce__(self) -> Any:
        raise OSError("the disk is full")


def test_a_writer_that_fails_leaves_the_file_before(tmp_path: Path) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "deep" / "file.ckpt"
    io.save_checkpoint({"weights": torch.ones(3)}, path)
    with pytest.raises(OSError, match="the disk is full"):
        io.save_checkpoint({"weights": torch.zeros(3), "last": Unwritable()}, path)
    assert io.load_checkpoint(path)["weights"].tolist() == [1, 1, 1]
    assert [file.name for file in path.parent.iterdir()] == ["file.ckpt"]
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        io.load_checkpoint(tmp_path / "none.ckpt")


def test_files_of_other_formats_are_read_or_refused(tmp_path: Path) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "file.ckpt"
    torch.save({"weights": torch.ones(3)}, path, _use_new_zipfile_serialization=False)  # as torch did at first
    assert io.load_checkpoint(path)["weights"].tolist() == [1, 1, 1]
    io.save_checkpoint({"weights": torch.ones(3)}, path)
    for broken in (path.read_bytes()[:-100], b"hello", b""):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="is no checkpoint, or was cut off; take an earlier one"):
            io.load_checkpoint(path)


class Failing(Callback):
    """Raises on one rank, or on all."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank in self.ranks:
            raise ValueError("a user's mistake")


@covering(keep=1, layout=LAYOUTS, kind=("OnExceptionCheckpoint", "ModelCheckpoint"))
def test_saving_while_one_rank_fails_waits_for_nobody(layout: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    if kind == "OnExceptionCheckpoint":
        saver: Callback = OnExceptionCheckpoint(tmp_path)
    else:
        saver = ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(AssertionError) as failure:
        run_on_ranks(2, fails_loudly, LAYOUTS[layout], saver, timeout=5.0)
    assert "a user's mistake" in str(failure.value)
    assert [file.name for file in tmp_path.iterdir()] == ["before"]


def fails_loudly(make: Callable[[], Any], saver: Callback) -> None:
    fitted(make, Tied(), callbacks=[Failing([1]), saver], enable_checkpointing=True)


class SavesInAStep(Plain):
    def __init__(self, step: str, path: Path) -> None:
        super().__init__()
        self.step, self.path = step, path

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.step == "training" and self.global_step == 1:
            self.trainer.save_checkpoint(self.path)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.step == "validation" and self.global_step:
            self.trainer.save_checkpoint(self.path)
        super().validation_step(batch, batch_idx)


WITHIN: dict[str, Callable[[], Any]] = {
    "tensor_parallel": partial(TensorParallelStrategy, 2),
    "pipeline": partial(PipelineParallelStrategy, 2, microbatches=2),
}


def saves_in_a_step(make: Callable[[], Any], step: str, path: Path, **run: Any) -> None:
    trainer(make(), max_epochs=1, **run).fit(SavesInAStep(step, path), *loaders("plain", 8, samples=32, val_samples=8))


@covering(keep=1, layout=WITHIN, step=("training", "validation"))
def test_saving_in_a_step_is_refused_where_ranks_are_not_together_in_it(layout: str, step: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"a checkpoint is saved in a step \((pp|tp)=2.* on_train_batch_end"):
        run_on_ranks(2, saves_in_a_step, WITHIN[layout], step, tmp_path / "a.ckpt", timeout=15.0)
    assert not (tmp_path / "a.ckpt").exists()


@pytest.mark.parametrize("layout", ["zero_3"])
def test_so_it_is_nowhere_else(layout: str, tmp_path: Path) -> None:
    run_on_ranks(2, saves_in_a_step, LAYOUTS[layout], "training", tmp_path / "a.ckpt")
    assert "blocks.3.up.weight" in saved(tmp_path / "a.ckpt")


class SavesAtTheEnd(Plain):
    """Saves in `on_train_end`, where ranks hold shards; the test saves again when the module is whole."""

    path: Path

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def at_the_end_and_after(make: Callable[[], Any], path: Path, devices: int, batch: int) -> dict[str, Tensor]:
    """Weights after one more step, by hand, of a run whose two last checkpoints are alike."""
    model = SavesAtTheEnd()
    model.path, after = path / "end.ckpt", path / "after.ckpt"
    run = trainer(make(), devices, max_steps=3)
    run.fit(model, *loaders("plain", batch, samples=48, val_samples=16))
    run.save_checkpoint(after)
    assert not [p for p in model.parameters() if type(p) is not nn.Parameter]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = run.optimizers[0]
    optimizer.step()
    run.strategy.barrier()
    end, again = (load(it) if it.is_dir() else torch.load(it, weights_only=True) for it in (model.path, after))
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        torch.testing.assert_close(again[name], end[name], rtol=0, atol=0)
    assert end["optimizer_states"][0]["state"]
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


ENDS: dict[str, Callable[..., Any]] = {
    **{f"zero_{stage}": partial(ZeroStrategy, 2, stage=stage) for stage in (1, 2, 3)},
    "tensor_parallel": partial(TensorParallelStrategy, 2),
    "pipeline": partial(PipelineParallelStrategy, 2, microbatches=2),
}


@covering(keep=5, layout=ENDS, checkpoint=("full", "sharded"))
def test_a_save_after_the_run_is_the_one_at_its_end_and_its_optimizer_steps_on(
    layout: str, checkpoint: str, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    expected = begun_on_one(at_the_end_and_after, partial(HybridStrategy), tmp_path / "one", 1, 16)
    make, batch = partial(ENDS[layout], checkpoint=checkpoint), 8 if layout.startswith("zero") else 16
    for found in run_on_ranks(2, at_the_end_and_after, make, tmp_path, 2, batch):
        torch.testing.assert_close(found, expected.result(), rtol=1e-5, atol=1e-6)
