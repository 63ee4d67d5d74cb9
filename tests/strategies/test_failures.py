"""Exceptions: what ranks do together while they handle one works; what one rank does alone waits for nobody."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset

from lightning_parallel import (
    DataParallel,
    DataParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from lightning_parallel.strategies.ranks.failures import one_line
from tests.ranks import run_on_ranks
from tests.tiers import covering, sampled
from tests.trainers import trainer

LAYOUTS: dict[str, Callable[..., Any]] = {
    "data_parallel": DataParallelStrategy,
    "zero_2": partial(ZeroStrategy, stage=2),
    "zero_3": ZeroStrategy,
    "pipeline": partial(PipelineParallelStrategy, microbatches=2),
    "tensor": TensorParallelStrategy,
}
PLACES = ["on_train_batch_start", "training_step", "on_train_batch_end"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Regression(LightningModule):
    """Does something at one place of the second batch, before or within the step."""

    def __init__(self, place: str = "", event: Callable[[LightningModule], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.place, self.event, self.steps = place, event, 0

    def at(self, place: str, batch_idx: int) -> None:
        if place == self.place and batch_idx == 1 and self.event is not None:
            self.event(self)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.at("on_train_batch_start", batch_idx)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.at("training_step", batch_idx)
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.at("on_train_batch_end", batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), batch_size=2)


def fail(_: LightningModule) -> None:
    raise ValueError("a user's mistake")


def save(path: Path, ranks: list[int], module: LightningModule) -> None:
    """As scripts do that save what they have when something goes wrong."""
    if module.global_rank in ranks:
        try:
            fail(module)
        except ValueError:
            module.trainer.save_checkpoint(path)
            module.trainer.strategy.barrier()


def saved_while_handling(make: Callable[[], Any], path: Path, place: str, ranks: list[int]) -> dict[str, Tensor]:
    module = Regression(place, partial(save, path, ranks))
    fitting = trainer(make(), max_steps=4)
    fitting.fit(module, loader())
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@sampled(1, "layout", LAYOUTS)
def test_checkpoint_of_all_ranks_in_an_exception_handler(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "handled.ckpt"
    ends = run_on_ranks(2, saved_while_handling, LAYOUTS[layout], path, "on_train_batch_end", [0, 1])
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == 2
    assert len(saved["optimizer_states"][0]["state"]) == 8
    resumed = run_on_ranks(2, resumed_from, LAYOUTS[layout], path)
    torch.testing.assert_close(resumed[0], ends[0])


def resumed_from(make: Callable[[], Any], path: Path) -> dict[str, Tensor]:
    module = Regression()
    trainer(make(), max_steps=4).fit(module, loader(), ckpt_path=path)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@sampled(1, "layout", ["data_parallel", "zero_3", "pipeline"])
def test_checkpoint_of_one_rank_in_an_exception_handler(layout: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        run_on_ranks(
            2, saved_while_handling, LAYOUTS[layout], tmp_path / "x.ckpt", "on_train_batch_end", [1], timeout=6.0
        )
    said = "rank 1 is at state_dict while it handles an exception, and not all ranks have come there"
    assert said in str(failure.value)
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
    kept = {name: value.detach().clone() for name, value in module.state_dict().items()}
    module.event = None
    trainer(make(), max_steps=2).fit(module, loader())
    return kept


@covering(keep=1, layout=LAYOUTS, place=PLACES)
def test_ranks_that_fail_alike_save_what_they_have_and_go_on(layout: str, place: str, tmp_path: Path) -> None:
    if (layout, place) == ("pipeline", "training_step"):
        pytest.skip("messages of the step are under way then; the test below")
    kept = run_on_ranks(2, saved_after_failing, LAYOUTS[layout], tmp_path, place)
    files = {file.stem: torch.load(file, weights_only=True) for file in tmp_path.iterdir()}
    assert files.keys() == {"inside", "outside", "later"}
    for saved in files.values():
        assert len(saved["optimizer_states"][0]["state"]) == 8
        for weights in kept:
            torch.testing.assert_close(saved["state_dict"], weights)


def test_ranks_that_fail_within_a_pipelines_step_end(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        run_on_ranks(2, saved_after_failing, LAYOUTS["pipeline"], tmp_path, "training_step", timeout=6.0)
    assert "outside.ckpt: the parts of other ranks are missing, for not all came to it" in str(failure.value)
    assert list(tmp_path.iterdir()) == []


class Silent(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError


def test_error_whose_own_text_fails_is_told_all_the_same() -> None:
    assert one_line(Silent()) == "Silent: its text cannot be read, for RuntimeError"


class Broken(Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        try:
            raise OSError("shard 7 cannot be read")
        except OSError as error:
            raise ValueError("a sample is broken\nhere") from error


def test_error_of_a_loaders_worker_is_told_with_its_cause() -> None:
    with pytest.raises(ValueError, match="Original Traceback") as failure:
        next(iter(DataLoader(Broken(), num_workers=1)))
    told = "Caught ValueError in DataLoader worker process 0: ValueError: a sample is broken"
    assert one_line(failure.value) == f"ValueError: {told}"


class Evaluating(Regression):
    """The evaluation takes gradients through all layers, or calls them the other way round."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            start = out = batch.clone().requires_grad_()
            for layer in self.layers if self.place == "gradients" else reversed(self.layers):
                out = layer(out)
            torch.autograd.grad(out.sum(), start)


def says_of(make: Callable[[], Any], module: LightningModule, *evaluated: DataLoader[Any]) -> str:
    """What a fit ends with: as it is raised, for a script that catches it."""
    try:
        trainer(make(), max_steps=4, limit_train_batches=2, num_sanity_val_steps=0).fit(module, loader(), *evaluated)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fails_on(rank: int, make: Callable[[], Any]) -> str:
    def event(module: LightningModule) -> None:
        if module.global_rank == rank:
            fail(module)

    return says_of(make, Regression("training_step", event))


def pipelines_of_two() -> HybridStrategy:
    return HybridStrategy(PipelineParallel(2, microbatches=2), DataParallel(2))


@sampled(1, "first", [0, 1])
def test_error_in_a_step_reaches_all_ranks_of_a_pipeline(first: int) -> None:
    said = run_on_ranks(2, fails_on, first, LAYOUTS["pipeline"], timeout=90.0)
    assert said.pop(first) == "ValueError: a user's mistake"
    assert said == [f"RuntimeError: rank {first} failed first: ValueError: a user's mistake"]


def test_so_do_those_of_pipelines_beside_it() -> None:
    said = run_on_ranks(4, fails_on, 3, pipelines_of_two, timeout=90.0)
    assert said.pop(3) == "ValueError: a user's mistake"
    assert said == ["RuntimeError: rank 3 failed first: ValueError: a user's mistake"] * 3


@pytest.mark.parametrize(("fault", "words"), [("gradients", "takes gradients to a tensor"), ("order", "in one order")])
def test_evaluation_error_reaches_all_ranks_of_a_pipeline(fault: str, words: str) -> None:
    said = run_on_ranks(2, says_of, LAYOUTS["pipeline"], Evaluating(fault), loader(), timeout=90.0)
    assert all(words in each for each in said), said
    assert len([each for each in said if "failed first: RuntimeError: " in each]) == 1, said


class Makes(Regression):
    """Makes its own loader, which rank 1 cannot."""

    def train_dataloader(self) -> DataLoader[Any]:
        if self.global_rank == 1:
            fail(self)
        return loader()


def makes_loaders() -> list[str]:
    try:
        trainer(PipelineParallelStrategy(2), max_steps=1).fit(Makes("nowhere", fail))
    except (ValueError, RuntimeError) as error:
        left = [name for kind in (DataLoader, BatchSampler) for name in vars(kind) if name.startswith("__old")]
        return [type(error).__name__, str(error), *left]
    return []


def test_loader_error_reaches_all_ranks_of_a_pipeline() -> None:
    others, own = run_on_ranks(2, makes_loaders, timeout=20.0)
    assert own == ["ValueError", "a user's mistake"]
    assert others == ["RuntimeError", "rank 1 could not make its data loaders: ValueError: a user's mistake"]
