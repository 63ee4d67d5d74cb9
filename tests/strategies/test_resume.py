"""A run that was stopped anywhere and went on is, bit for bit, the run that never stopped."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from lightning_parallel import (
    ContextParallel,
    ContextParallelStrategy,
    DataParallel,
    DataParallelStrategy,
    ExpertParallel,
    ExpertParallelStrategy,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.strategies.test_checkpoints import SaveAt
from tests.tiers import covering, sampled
from tests.trainers import trainer

LAYOUTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "none": (1, HybridStrategy),
    "data_parallel": (2, partial(DataParallelStrategy, 2)),
    "zero_1": (2, partial(ZeroStrategy, 2, stage=1)),
    "zero_2": (2, partial(ZeroStrategy, 2, stage=2)),
    "zero_3": (2, partial(ZeroStrategy, 2, stage=3)),
}


class Noisy(Dataset):
    """Samples augmented by the host's random numbers, unless another process loads them."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        noise = 0.0 if get_worker_info() else 0.1 * torch.randn(6)
        return index, torch.linspace(-1, 1, 6) * index / 22 + noise


class Dropping(LightningModule):
    """Draws random numbers in the model, and notes what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Dropout(0.3))
        self.head = nn.Linear(7, 6, bias=False)
        self.saw: list[Any] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        numbers, inputs = batch
        loss = F.mse_loss(self.head(self.stem(inputs)), inputs)
        self.saw.append((self.current_epoch, batch_idx, numbers.tolist(), loss.item()))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}]


class Counting(Dropping):
    """Asks how many steps there will be, for which Lightning makes the loaders before it reads where they stood."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Validated(Dropping):
    """Reads two loaders every two batches, with the last ones before an epoch ends and without them."""

    loaders, interval = 2, 2

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.head(self.stem(batch[0])).mean())

    def val_dataloader(self) -> Any:
        samples = torch.linspace(-1, 1, 48).view(8, 6)
        return [DataLoader(TensorDataset(samples * k), 4) for k in range(1, self.loaders + 1)]


class ValidatedAtTheEnd(Validated):
    interval = 6


class ValidatedUnevenly(Validated):
    loaders, interval = 1, 4


class SaveAtEnd(Callback):
    """Saves where ModelCheckpoint does unless told otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "end_of_epoch.ckpt")


def fit(
    strategy: Any,
    accumulate: int,
    workers: int,
    resume: Path | None = None,
    module: type[Dropping] = Dropping,
    make_loader: Callable[..., DataLoader] = DataLoader,
    **run: Any,
) -> Dropping:
    seed_everything(3 if resume is None else 4, verbose=False)
    model = module()
    loader = make_loader(Noisy(), 4 // int(os.environ["WORLD_SIZE"]), shuffle=True, num_workers=workers)
    arguments = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    interval = getattr(module, "interval", None)
    trainer(strategy, **arguments, val_check_interval=interval, **run).fit(
        model, loader, ckpt_path=resume, weights_only=True
    )
    return model


def stop_and_go_on(
    make: Callable[[], Any],
    accumulate: int,
    workers: int,
    stops: list[int],
    module: type[Dropping] = Dropping,
    make_loader: Callable[..., DataLoader] = DataLoader,
) -> None:
    """Six batches an epoch, the last of 2 samples of 4; saved after some of them."""
    warnings.filterwarnings("ignore", ".*os.fork.*")
    folder = Path(os.environ["RANKS_SCRATCH"], "stops")
    savers = [SaveAt(folder, stops), SaveAtEnd(folder)]
    whole = fit(make(), accumulate, workers, None, module, make_loader, callbacks=savers)
    for file, done in [*((f"{stop}.ckpt", stop) for stop in stops), ("end_of_epoch.ckpt", 6)]:
        rest = fit(make(), accumulate, workers, folder / file, module, make_loader)
        assert rest.saw == whole.saw[done:], f"from {file}: {rest.saw} against {whole.saw[done:]}"
        for name, value in whole.state_dict().items():
            assert torch.equal(value, rest.state_dict()[name]), f"from {file}: {name}"


@covering(keep=1, layout=LAYOUTS, accumulate=(1, 2))
def test_resumed_runs_are_identical(layout: str, accumulate: int) -> None:
    n, make = LAYOUTS[layout]
    stops = {1: [2, 6, 9], 2: [2, 6]}[accumulate]
    run_on_ranks(n, stop_and_go_on, make, accumulate, 0, stops)


@sampled(1, "layout", ["data_parallel", "none"])
def test_resumed_runs_whose_loaders_were_made_early(layout: str) -> None:
    n, make = LAYOUTS[layout]
    run_on_ranks(n, stop_and_go_on, make, 1, 0, [2, 6, 9], Counting)


@sampled(1, "module", [Validated, ValidatedAtTheEnd, ValidatedUnevenly])
def test_so_are_those_that_leave_a_validation_out(module: type[Validated]) -> None:
    """Lightning does not make up for one that followed the checkpoint; what its loaders drew is drawn all the same."""
    run_on_ranks(2, stop_and_go_on, LAYOUTS["data_parallel"][1], 1, 0, [2, 4, 6, 8], module)


def stop_twice() -> None:
    """After an epoch; and then within the next one."""
    folder = Path(os.environ["RANKS_SCRATCH"], "stops")
    whole = fit(HybridStrategy(), 1, 0, callbacks=[SaveAt(folder, [6])])
    fit(HybridStrategy(), 1, 0, folder / "6.ckpt", callbacks=[SaveAt(folder / "again", [2])])
    rest = fit(HybridStrategy(), 1, 0, folder / "again" / "2.ckpt")
    assert rest.saw == whole.saw[8:]
    assert all(torch.equal(value, rest.state_dict()[name]) for name, value in whole.state_dict().items())


def test_run_resumed_twice() -> None:
    run_on_ranks(1, stop_twice)


class Killed(Exception):  # noqa: N818
    pass


class KillAfter(Callback):
    """Stands for a SIGKILL after some batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def on_train_batch_start(self, *_: Any) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1


def killed_within_an_accumulation() -> None:
    """The step of the checkpoint is not saved again, without the gradients of the batch that came after it."""
    warnings.filterwarnings("ignore", ".*exists and is not empty")
    folder = Path(os.environ["RANKS_SCRATCH"], "often")
    save = {"enable_checkpointing": True}

    def often() -> ModelCheckpoint:
        return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)

    whole = fit(HybridStrategy(), 2, 0, callbacks=[often()], **save)
    before = (folder / "step=2.ckpt").read_bytes()
    with pytest.raises(Killed):
        fit(HybridStrategy(), 2, 0, folder / "step=2.ckpt", callbacks=[often(), KillAfter(1)], **save)
    assert (folder / "step=2.ckpt").read_bytes() == before
    rest = fit(HybridStrategy(), 2, 0, folder / "step=2.ckpt", callbacks=[often()], **save)
    assert all(torch.equal(value, rest.state_dict()[name]) for name, value in whole.state_dict().items())


def test_run_killed_within_an_accumulation() -> None:
    run_on_ranks(1, killed_within_an_accumulation)


def test_resumed_runs_are_identical_with_loader_workers() -> None:
    run_on_ranks(2, stop_and_go_on, LAYOUTS["zero_3"][1], 1, 1, [4], limit=120)


def write_in_the_background(make: Callable[..., Any], ours: bool) -> None:
    mine = {"checkpoint": "sharded", "async_save": True}
    stop_and_go_on(
        lambda: make(**(mine if ours else {"checkpoint_io": AsyncCheckpointIO(AtomicCheckpointIO())})), 1, 0, [2]
    )


@sampled(1, ("layout", "ours"), [("data_parallel", False), ("zero_3", True)])
def test_checkpoints_written_in_the_background(layout: str, ours: bool) -> None:
    run_on_ranks(2, write_in_the_background, LAYOUTS[layout][1], ours)


# ---------------------------------------------------------------- models that are divided


MODELS: dict[str, tuple[int, int, Callable[[], Any], str]] = {
    "tensor": (2, 1, partial(TensorParallelStrategy, 2), "gpt"),
    "tensor whole": (2, 1, partial(TensorParallelStrategy, 2, sequence_parallel=False), "gpt"),
    "tensor x zero": (4, 2, partial(HybridStrategy, TensorParallel(2), Zero(2)), "gpt"),
    "pipeline": (2, 1, partial(PipelineParallelStrategy, 2), "llama"),
    "pipeline x tensor": (4, 1, partial(HybridStrategy, PipelineParallel(2), TensorParallel(2)), "gpt"),
    "pipeline x zero": (4, 2, partial(HybridStrategy, PipelineParallel(2), Zero(2, stage=2)), "gpt"),
    "context": (2, 1, partial(ContextParallelStrategy, 2), "gpt"),
    "context x tensor": (4, 1, partial(HybridStrategy, ContextParallel(2), TensorParallel(2)), "llama"),
    "expert": (2, 2, partial(ExpertParallelStrategy, 2), "moe"),
    "expert x tensor": (4, 2, partial(HybridStrategy, DataParallel(2), TensorParallel(2), ExpertParallel(2)), "moe"),
}


TWO_BLOCKS = {"gpt": {"n_layers": 2}, "moe": {"n_layers": 2}, "llama": {"num_hidden_layers": 2}}


def fit_model(layout: str, accumulate: int, resume: Path | None = None, **run: Any) -> dict[str, Tensor]:
    _, readers, make, column = MODELS[layout]
    model, data = build(column, **TWO_BLOCKS[column]), loaders(column, 8 // readers, samples=40, shuffle=True)
    arguments = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    trainer(make(), **arguments, **run).fit(model, data.train, data.val, ckpt_path=resume)
    return model.state_dict()


def stop_models_and_go_on(layout: str, accumulate: int) -> None:
    """Within the first epoch, at its end, and within the second."""
    warnings.simplefilter("ignore")
    folder, stops = Path(os.environ["RANKS_SCRATCH"], "stops"), [2, 5, 7]
    sanity = {"num_sanity_val_steps": 2}
    whole = fit_model(layout, accumulate, callbacks=[SaveAt(folder, stops)], **sanity)
    for stop in stops:
        rest = fit_model(layout, accumulate, folder / f"{stop}.ckpt", **sanity)
        differ = [name for name, value in whole.items() if not torch.equal(value, rest[name])]
        assert not differ, f"after step {stop}: {differ}"


@covering(keep=1, layout=MODELS, accumulate=(2, 1))
def test_resumed_runs_of_divided_models_are_identical(layout: str, accumulate: int) -> None:
    run_on_ranks(MODELS[layout][0], stop_models_and_go_on, layout, accumulate)
