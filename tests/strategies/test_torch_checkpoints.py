"""Of what a user writes with torch's distributed checkpoint every row is in its place on any layout, fused ones too."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, load, save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from lightning_parallel import (
    HybridStrategy,
    PipelineParallel,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.tiers import covering
from tests.trainers import trainer

Strategy = Callable[[], Any]
LAYOUTS: dict[str, tuple[int, Strategy]] = {
    "one": (1, lambda: "auto"),
    "zero3": (2, partial(ZeroStrategy, 2)),
    "tp2": (2, partial(TensorParallelStrategy, 2)),
    "tp2 x zero3": (4, lambda: HybridStrategy(Zero(2), TensorParallel(2))),
    "pp2 x tp2": (4, lambda: HybridStrategy(PipelineParallel(2, microbatches=2), TensorParallel(2))),
}


def wholes(trainer: Trainer, **options: Any) -> AbstractContextManager[None]:
    """Inside, parameters are plain whole tensors on every rank, as on one device."""
    strategy = trainer.strategy
    return strategy.full_parameters(**options) if isinstance(strategy, MeshStrategy) else nullcontext()


class Saves(Callback):
    """On one rank: in hooks the world has the ranks that read different samples, and each of several would write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        with wholes(trainer):
            state = self.state(module)
            if trainer.is_global_zero:
                save({"model": state}, checkpoint_id=self.folder, no_dist=True)
        trainer.strategy.barrier()

    def state(self, module: LightningModule) -> dict[str, Any]:
        return module.state_dict()


class SavesByTorch(Saves):
    """Through the functions that torch has for it."""

    def state(self, module: LightningModule) -> dict[str, Any]:
        return get_model_state_dict(module)


class Loads(Saves):
    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        with wholes(trainer, writable=True):
            self.load(module)
        trainer.should_stop = True  # before a step is taken

    def load(self, module: LightningModule) -> None:
        state = {name: torch.full_like(value, 7) for name, value in module.state_dict().items()}
        load({"model": state}, checkpoint_id=self.folder)
        module.load_state_dict(state)


class LoadsByTorch(Loads):
    def load(self, module: LightningModule) -> None:
        state = get_model_state_dict(module)
        load({"model": state}, checkpoint_id=self.folder)
        set_model_state_dict(module, state)


class SavesParts(Saves):
    """Without `full_parameters`: hooks reach the ranks that read different samples, and others hold parts too."""

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        refused = partial(
            pytest.raises, CheckpointException, match=r"take part in what this hook calls.*full_parameters"
        )
        with refused():
            save({"model": module.state_dict()}, checkpoint_id=self.folder)
        super().on_train_end(trainer, module)
        with refused():
            load({"model": module.state_dict()}, checkpoint_id=self.folder)


def train(make_strategy: Strategy, column: str, callback: type[Saves], folder: Path, seed: int) -> dict[str, Tensor]:
    """The weights at the end, as Lightning's checkpoint has them."""
    warnings.filterwarnings("ignore")
    run = trainer(make_strategy(), callbacks=[callback(folder)], max_epochs=1)
    run.fit(build(column, seed), *loaders(column, 8, samples=16))
    run.save_checkpoint(folder.parent / "plain.ckpt", weights_only=True)
    weights: dict[str, Tensor] = torch.load(folder.parent / "plain.ckpt", weights_only=True)["state_dict"]
    return weights


@covering(
    keep=1,
    column=("gpt2", "phi3"),  # maps of queries, keys and values, of gates and ups, as one
    writer=LAYOUTS,
    reader=LAYOUTS,
    by_torch=(False, True),
)
def test_weights_are_written_and_read(tmp_path, column, writer, reader, by_torch):
    saves, loads = (SavesByTorch, LoadsByTorch) if by_torch else (Saves, Loads)
    found = []
    for layout, callback, seed in ((writer, saves, 0), (reader, loads, 1)):
        ranks, make_strategy = LAYOUTS[layout]
        given = (make_strategy, column, callback, tmp_path / "parts", seed)
        found.append(run_on_ranks(ranks, train, *given, timeout=60.0, limit=120.0)[0])
    written, read = found
    assert written.keys() == read.keys()
    assert [name for name in written if not torch.equal(written[name], read[name])] == []


@pytest.mark.parametrize("layout", ["tp2", "tp2 x zero3"])
def test_parts_of_which_other_ranks_hold_some_are_refused(tmp_path: Path, layout: str) -> None:
    ranks, make_strategy = LAYOUTS[layout]
    run_on_ranks(ranks, train, make_strategy, "gpt2", SavesParts, tmp_path / "parts", 0, timeout=60.0, limit=120.0)
