"""What users do with checkpoints: hooks, metrics, loading without a Trainer, and saving in steps and after the run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from lightning_parallel.strategies.named import HybridStrategy
from tests.layouts import layouts
from tests.models import Plain, loaders
from tests.ranks import RanksFailed, run_on_ranks
from tests.strategies.checkpoint.saves import Tied, content, fitted, tokens
from tests.strategies.one_and_two import assert_like_one_device
from tests.tiers import sampled
from tests.trainers import trainer

LAYOUTS = layouts("data parallel", "zero 1", "zero 2", "zero 3", "tensor parallel", "pipeline")


class SaveHalfway(Callback):
    """Saves within an epoch, and notes what the metric has seen in all by its end."""

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


class Grown(Tied):
    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.full((3,), 7.0))


def used(make: Callable[[], Any], folder: Path) -> None:
    path, weights, half = folder / "file.ckpt", folder / "weights.ckpt", folder / "half.ckpt"
    model = Editing(width=5, lr=0.2)
    run = fitted(make, model)
    run.save_checkpoint(path)
    run.save_checkpoint(weights, weights_only=True)
    table = model.table.weight.detach().clone()
    torch.testing.assert_close(content(path)["state_dict"]["table.weight"], table + 1)
    assert "optimizer_states" not in content(weights)
    again = Editing(width=5)
    (result,) = trainer(make()).test(again, tokens(), ckpt_path=weights, verbose=False)
    torch.testing.assert_close(again.table.weight, 2 * (table + 1))
    assert again.head.weight is again.table.weight
    assert again.steps == model.steps > 0
    assert result["test_loss"] == pytest.approx(sum(again.loss(batch) for batch in tokens()).item() / 4, rel=1e-5)
    if path.is_file():
        loaded = Editing.load_from_checkpoint(path, lr=0.3, weights_only=True)
        assert (loaded.hparams.width, loaded.hparams.lr) == (5, 0.3)
        assert torch.equal(loaded.head.weight, again.head.weight)
        assert loaded.steps == model.steps
    # A metric that is saved holds what all ranks have seen, as on one device.
    whole, rest, model = SaveHalfway(half), SaveHalfway(half), Tied()
    fitted(make, model, callbacks=[whole])
    assert content(half)["state_dict"]["metric.weight"] == 2.0
    trainer(make(), max_epochs=1, callbacks=[rest]).fit(Tied(), tokens(), tokens(), ckpt_path=half)
    assert rest.end == pytest.approx(whole.end, rel=1e-6)
    grown, strict = Grown(), Grown()
    trainer(make()).validate(grown, tokens(), ckpt_path=half, verbose=False)
    torch.testing.assert_close(grown.table.weight, content(half)["state_dict"]["table.weight"])
    assert grown.extra.tolist() == [7.0] * 3
    strict.strict_loading = True
    with pytest.raises(RuntimeError, match=r"Missing key.* \"extra\""):
        trainer(make()).validate(strict, tokens(), ckpt_path=half, verbose=False)


@sampled(
    2, ("layout", "form"), [("zero 3", "full"), ("zero 1", "full"), ("zero 3", "sharded"), ("data parallel", "sharded")]
)
def test_checkpoints_are_edited_and_read_by_anyone(layout: str, form: str, tmp_path: Path) -> None:
    run_on_ranks(2, used, partial(LAYOUTS[layout].strategy, checkpoint=form), tmp_path)


class Unwritable:
    def __reduce__(self) -> Any:
        raise OSError("the disk is full")


def test_file_is_whole_or_refused(tmp_path: Path) -> None:
    """After a save that fails, in torch's first format, and cut off."""
    io, path = AtomicCheckpointIO(), tmp_path / "deep" / "file.ckpt"
    io.save_checkpoint({"weights": torch.ones(3)}, path)
    with pytest.raises(OSError, match="the disk is full"):
        io.save_checkpoint({"weights": torch.zeros(3), "last": Unwritable()}, path)
    assert io.load_checkpoint(path)["weights"].tolist() == [1, 1, 1]
    assert [file.name for file in path.parent.iterdir()] == ["file.ckpt"]
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        io.load_checkpoint(tmp_path / "none.ckpt")
    torch.save({"weights": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert io.load_checkpoint(path)["weights"].tolist() == [1, 1, 1]
    io.save_checkpoint({"weights": torch.ones(3)}, path)
    for broken in (path.read_bytes()[:-100], b"hello", b""):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="is not a checkpoint, or was cut off; take an earlier one"):
            io.load_checkpoint(path)


class Failing(Callback):
    """Raises on rank 1 alone."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == 1:
            raise ValueError("a user's mistake")


def fails_loudly(make: Callable[[], Any], savers: list[Callback]) -> None:
    fitted(make, Tied(), callbacks=[Failing(), *savers], enable_checkpointing=True)


def test_save_while_one_rank_fails_waits_for_nobody(tmp_path: Path) -> None:
    (tmp_path / "before").touch()
    savers = [OnExceptionCheckpoint(tmp_path), ModelCheckpoint(tmp_path, save_on_exception=True)]
    with pytest.raises(RanksFailed, match="a user's mistake"):
        run_on_ranks(2, fails_loudly, LAYOUTS["zero 3"].strategy, savers, timeout=5.0)
    assert [file.name for file in tmp_path.iterdir()] == ["before"]


class SavesInAStep(Plain):
    def __init__(self, step: str, path: Path) -> None:
        super().__init__(blocks=2)
        self.step, self.path = step, path

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.step == "training" and self.global_step == 1:
            self.trainer.save_checkpoint(self.path)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.step == "validation" and self.global_step:
            self.trainer.save_checkpoint(self.path)
        super().validation_step(batch, batch_idx)


def saves_in_a_step(make: Callable[[], Any], step: str, path: Path) -> None:
    trainer(make(), max_epochs=1).fit(SavesInAStep(step, path), *loaders("plain", 8, samples=32, val_samples=8))


@sampled(1, ("layout", "step"), [("pipeline", "training"), ("tensor parallel", "validation")])
def test_save_in_a_step_is_refused_where_ranks_are_apart(layout: str, step: str, tmp_path: Path) -> None:
    """And is complete with ZeRO 3, where they are not."""
    with pytest.raises(RanksFailed, match=r"a checkpoint is saved in a step \((pp|tp)=2.* on_train_batch_end"):
        run_on_ranks(2, saves_in_a_step, LAYOUTS[layout].strategy, step, tmp_path / "a.ckpt", timeout=15.0)
    assert not (tmp_path / "a.ckpt").exists()
    run_on_ranks(2, saves_in_a_step, LAYOUTS["zero 3"].strategy, "training", tmp_path / "a.ckpt")
    assert "blocks.1.up.weight" in content(tmp_path / "a.ckpt")["state_dict"]


class SavesAtTheEnd(Plain):
    """Saves in `on_train_end`, where ranks hold shards; the test saves again when the module is whole."""

    path: Path

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def at_the_end_and_after(make: Callable[[], Any], path: Path, devices: int, batch: int) -> dict[str, Tensor]:
    """Weights after one more step, by hand, of a run whose two last checkpoints are alike."""
    torch.manual_seed(0)
    model = SavesAtTheEnd(blocks=2)
    model.path, after = path / "end.ckpt", path / "after.ckpt"
    run = trainer(make(), devices, max_steps=3)
    run.fit(model, *loaders("plain", batch, samples=48, val_samples=16))
    run.save_checkpoint(after)
    assert not [p for p in model.parameters() if type(p) is not nn.Parameter]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.optimizers[0].step()
    run.strategy.barrier()
    end, again = content(model.path), content(after)
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        torch.testing.assert_close(again[name], end[name], rtol=0, atol=0)
    assert end["optimizer_states"][0]["state"]
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


ENDS = [("zero 3", "sharded"), ("zero 2", "full"), ("tensor parallel", "sharded"), ("pipeline", "full")]


@sampled(2, ("layout", "form"), ENDS)
def test_save_after_the_run_is_the_one_at_its_end(layout: str, form: str, tmp_path: Path) -> None:
    """And its optimizer steps on."""
    (tmp_path / "one").mkdir()
    ranks, readers, strategy = LAYOUTS[layout]
    many = (partial(strategy, checkpoint=form), tmp_path, ranks, 16 // readers)
    assert_like_one_device(at_the_end_and_after, 2, (HybridStrategy, tmp_path / "one", 1, 16), many, atol=1e-6)
