"""Exceptions: what ranks do together while they handle one works; what one rank does alone waits for nobody."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from lightning_parallel.strategies.ranks.failures import one_line
from tests.layouts import layouts
from tests.ranks import run_on_ranks
from tests.strategies.faults.regression import LAYOUTS, Regression, fail, fail_on, loader, weights
from tests.tiers import sampled
from tests.trainers import trainer


def save_on_rank_1(path: Path, module: LightningModule) -> None:
    """Saves while it handles an exception, as scripts do."""
    try:
        fail_on(1, module)
    except ValueError:
        module.trainer.save_checkpoint(path)


def saved_by_one(path: Path) -> None:
    module = Regression("on_train_batch_end", partial(save_on_rank_1, path))
    trainer(LAYOUTS["zero 3"].strategy(), max_steps=4).fit(module, loader())


def test_checkpoint_of_one_rank_in_an_exception_handler(tmp_path: Path) -> None:
    said = "rank 1 calls state_dict while it handles an exception, but not all ranks do"
    with pytest.raises(AssertionError, match=said):
        run_on_ranks(2, saved_by_one, tmp_path / "x.ckpt", timeout=6.0)
    assert list(tmp_path.iterdir()) == []


class Noting(Callback):
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        assert trainer.strategy.broadcast(trainer.global_rank) == 0


def saved_after_failing(make: Callable[[], Any], folder: Path, place: str) -> dict[str, Tensor]:
    module = Regression(place, fail)
    callbacks = [ModelCheckpoint(folder, "inside", save_on_exception=True), Noting()]
    failing = trainer(make(), max_steps=4, callbacks=callbacks, enable_checkpointing=True)
    try:
        failing.fit(module, loader())
    except ValueError:
        failing.save_checkpoint(folder / "outside.ckpt")
    failing.save_checkpoint(folder / "later.ckpt")
    kept = weights(module)
    module.event = None
    trainer(make(), max_steps=2).fit(module, loader())
    return kept


@sampled(
    1,
    ("layout", "place"),
    [
        ("tensor parallel", "training_step"),
        ("pipeline", "on_train_batch_end"),
        ("zero 3", "on_train_batch_start"),
        ("data parallel", "training_step"),
    ],
)
def test_failure_of_all_ranks_is_saved_and_gone_on_from(layout: str, place: str, tmp_path: Path) -> None:
    kept = run_on_ranks(2, saved_after_failing, LAYOUTS[layout].strategy, tmp_path, place)
    files = {file.stem: torch.load(file, weights_only=True) for file in tmp_path.iterdir()}
    assert files.keys() == {"inside", "outside", "later"}
    for saved in files.values():
        assert len(saved["optimizer_states"][0]["state"]) == 8
        for found in kept:
            torch.testing.assert_close(saved["state_dict"], found)


class Silent(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError


class Broken(Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        try:
            raise OSError("shard 7 cannot be read")
        except OSError as error:
            raise ValueError("a sample is broken\nhere") from error


def test_errors_are_told_in_one_line() -> None:
    """Also one whose own text fails; of one in a loader's worker with its cause."""
    assert one_line(Silent()) == "Silent: its text cannot be read (RuntimeError)"
    with pytest.raises(ValueError, match="Original Traceback") as failure:
        next(iter(DataLoader(Broken(), num_workers=1)))
    told = "Caught ValueError in DataLoader worker process 0: ValueError: a sample is broken"
    assert one_line(failure.value) == f"ValueError: {told}"


class Evaluating(Regression):
    """Its evaluation takes gradients through all layers, or calls them the other way round."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            start = out = batch.clone().requires_grad_()
            for layer in self.layers if self.place == "gradients" else reversed(self.layers):
                out = layer(out)
            torch.autograd.grad(out.sum(), start)


def error_of(make: Callable[[], Any], module: LightningModule, *evaluated: DataLoader[Any]) -> str:
    options = {"limit_train_batches": 2, "num_sanity_val_steps": 0}
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer(make(), max_steps=4, **options).fit(module, loader(), *evaluated)
    return f"{error.typename}: {error.value}"


@sampled(1, ("layout", "first"), [("pipeline", 1), ("pipeline x data parallel", 3), ("pipeline", 0)])
def test_error_in_a_step_reaches_all_ranks_of_a_pipeline(layout: str, first: int) -> None:
    """Those of the pipelines beside it too."""
    ((ranks, _, make),) = layouts(layout).values()
    said = run_on_ranks(ranks, error_of, make, Regression("training_step", partial(fail_on, first)), timeout=90.0)
    assert said.pop(first) == "ValueError: a user's mistake"
    assert said == [f"RuntimeError: rank {first} failed first: ValueError: a user's mistake"] * (ranks - 1)


@sampled(
    1,
    ("fault", "words"),
    [
        ("gradients", ["computes gradients w.r.t. a tensor of another", "use ZeroStrategy"]),
        ("order", ["was called where", "a pipeline needs blocks that run in one order"]),
    ],
)
def test_evaluation_error_reaches_all_ranks_of_a_pipeline(fault: str, words: list[str]) -> None:
    said = run_on_ranks(2, error_of, LAYOUTS["pipeline"].strategy, Evaluating(fault), loader(), timeout=90.0)
    assert all(word in each for each in said for word in words), said
    assert len([each for each in said if "failed first: RuntimeError: " in each]) == 1, said


class Makes(Regression):
    """Makes its own loader, which rank 1 cannot."""

    def train_dataloader(self) -> DataLoader[Any]:
        fail_on(1, self)
        return loader()


def makes_loaders() -> list[str]:
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer(LAYOUTS["pipeline"].strategy(), max_steps=1).fit(Makes())
    left = [name for kind in (DataLoader, BatchSampler) for name in vars(kind) if name.startswith("__old")]
    return [error.typename, str(error.value), *left]


def test_loader_error_reaches_all_ranks_of_a_pipeline() -> None:
    others, own = run_on_ranks(2, makes_loaders, timeout=20.0)
    assert own == ["ValueError", "a user's mistake"]
    assert others == ["RuntimeError", "rank 1 could not make its data loaders: ValueError: a user's mistake"]
