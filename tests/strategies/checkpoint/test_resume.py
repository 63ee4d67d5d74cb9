"""A run that was stopped anywhere and went on is, bit for bit, the run that never stopped."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from lightning_parallel import ContextParallel, HybridStrategy
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from tests.layouts import TP2, Layout, hybrid, layouts
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.strategies.checkpoint.saves import SaveAt, SaveAtEnd
from tests.strategies.one_and_two import require_like, scratch
from tests.tiers import sampled
from tests.trainers import trainer

LAYOUTS = {"none": Layout(1, 1, HybridStrategy)} | layouts("data parallel", "zero 1", "zero 2", "zero 3")


class Noisy(Dataset):
    """Samples augmented by the host's random numbers, unless another process loads them."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        noise = 0.0 if get_worker_info() else 0.1 * torch.randn(6)
        return index, torch.linspace(-1, 1, 6) * index / 22 + noise


class Dropping(LightningModule):
    """Draws random numbers in the model, and notes what it saw."""

    interval: int | None = None

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


class Validated(Counting):
    """Reads two loaders every two batches. Lightning does not make up for a validation that followed the checkpoint;
    what its loaders drew is drawn all the same."""

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


def fit(
    strategy: Any,
    accumulate: int = 1,
    workers: int = 0,
    module: type[Dropping] = Dropping,
    make_loader: Callable[..., DataLoader] = DataLoader,
    *,
    resume: Path | None = None,
    **run: Any,
) -> Dropping:
    seed_everything(3 if resume is None else 4, verbose=False)
    model = module()
    loader = make_loader(Noisy(), 4 // int(os.environ["WORLD_SIZE"]), shuffle=True, num_workers=workers)
    run |= {"max_epochs": 2, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    trainer(strategy, val_check_interval=module.interval, **run).fit(model, loader, ckpt_path=resume, weights_only=True)
    return model


def require_rest(whole: Dropping, rest: Dropping, done: int, where: Any = "") -> None:
    assert rest.saw == whole.saw[done:], f"from {where}: {rest.saw} against {whole.saw[done:]}"
    require_like(whole.state_dict(), rest.state_dict(), rtol=0, atol=0, where=f"from {where}")


def stop_and_go_on(make: Callable[[], Any], stops: list[int], *given: Any, **options: Any) -> None:
    """Six batches an epoch, the last of 2 samples of 4; saved after some of them."""
    warnings.filterwarnings("ignore", ".*os.fork.*")
    folder = scratch() / "stops"
    whole = fit(make(), *given, **options, callbacks=[SaveAt(folder, stops), SaveAtEnd(folder)])
    for file, done in [*((f"{stop}.ckpt", stop) for stop in stops), ("end_of_epoch.ckpt", 6)]:
        require_rest(whole, fit(make(), *given, **options, resume=folder / file), done, file)


@sampled(
    2,
    ("layout", "accumulate", "workers", "module", "stops"),
    [
        ("zero 1", 2, 0, Validated, [2, 6, 8]),
        ("none", 1, 0, Counting, [6, 9]),
        ("data parallel", 1, 0, ValidatedAtTheEnd, [4, 6, 8]),
        ("data parallel", 1, 0, ValidatedUnevenly, [2, 4, 6, 8]),
        ("zero 2", 2, 0, Dropping, [2, 6]),
        ("zero 3", 1, 1, Dropping, [4]),
    ],
)
def test_resumed_runs_are_identical(
    layout: str, accumulate: int, workers: int, module: type[Dropping], stops: list[int]
) -> None:
    n, _, make = LAYOUTS[layout]
    run_on_ranks(n, stop_and_go_on, make, stops, accumulate, workers, module, limit=120)


def write_in_the_background(make: Callable[..., Any], ours: bool) -> None:
    mine = {"checkpoint": "sharded", "async_save": True}
    stop_and_go_on(lambda: make(**(mine if ours else {"checkpoint_io": AsyncCheckpointIO(AtomicCheckpointIO())})), [2])


@pytest.mark.parametrize(
    ("layout", "ours"), [("zero 3", True), pytest.param("data parallel", False, marks=pytest.mark.exhaustive)]
)
def test_checkpoints_written_in_the_background(layout: str, ours: bool) -> None:
    run_on_ranks(2, write_in_the_background, LAYOUTS[layout].strategy, ours)


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


def stop_twice() -> None:
    """After an epoch; and then within the next one."""
    folder = scratch() / "stops"
    whole = fit(HybridStrategy(), callbacks=[SaveAt(folder, [6])])
    fit(HybridStrategy(), resume=folder / "6.ckpt", callbacks=[SaveAt(folder / "again", [2])])
    require_rest(whole, fit(HybridStrategy(), resume=folder / "again" / "2.ckpt"), 8)


def killed_within_an_accumulation() -> None:
    """The step of the checkpoint is not saved again, without the gradients of the batch that came after it."""
    warnings.filterwarnings("ignore", ".*exists and is not empty")
    folder = scratch() / "often"

    def often(*more: Callback, **options: Any) -> Dropping:
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
        return fit(HybridStrategy(), 2, callbacks=[saver, *more], enable_checkpointing=True, **options)

    whole, before = often(), (folder / "step=2.ckpt").read_bytes()
    with pytest.raises(Killed):
        often(KillAfter(1), resume=folder / "step=2.ckpt")
    assert (folder / "step=2.ckpt").read_bytes() == before
    require_rest(whole, often(resume=folder / "step=2.ckpt"), 4)


def stopped_again() -> None:
    stop_twice()
    killed_within_an_accumulation()


def test_runs_that_are_stopped_again_are_identical() -> None:
    run_on_ranks(1, stopped_again)


GPTS = layouts("tensor parallel, sequence whole", "tensor x zero 3", "pipeline x tensor", "pipeline x zero 2")
MODELS = {name: (layout, "gpt") for name, layout in GPTS.items()} | {
    "context x tensor": (Layout(4, 1, hybrid(ContextParallel(2), TP2)), "llama"),
    "pipeline": (layouts("pipeline")["pipeline"], "llama"),
    "expert x tensor": (layouts("expert x tensor")["expert x tensor"], "moe"),
}
TWO_BLOCKS = {"gpt": {"n_layers": 2}, "moe": {"n_layers": 2}, "llama": {"num_hidden_layers": 2}}


def fit_model(layout: str, resume: Path | None = None, **run: Any) -> dict[str, Tensor]:
    (_, readers, make), column = MODELS[layout]
    model, data = build(column, **TWO_BLOCKS[column]), loaders(column, 8 // readers, samples=40, shuffle=True)
    run |= {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "num_sanity_val_steps": 2}
    trainer(make(), **run).fit(model, data.train, data.val, ckpt_path=resume)
    return model.state_dict()


def stop_models_and_go_on(layout: str) -> None:
    """Within the first epoch, at its end, and within the second."""
    warnings.simplefilter("ignore")
    folder, stops = scratch() / "stops", [2, 5, 7]
    whole = fit_model(layout, callbacks=[SaveAt(folder, stops)])
    for stop in stops:
        rest = fit_model(layout, folder / f"{stop}.ckpt")
        require_like(whole, rest, rtol=0, atol=0, where=f"after step {stop}")


@sampled(1, "layout", MODELS)
def test_resumed_runs_of_divided_models_are_identical(layout: str) -> None:
    run_on_ranks(MODELS[layout][0].ranks, stop_models_and_go_on, layout)
