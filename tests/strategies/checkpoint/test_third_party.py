"""Checkpoints of others: of Lightning's own strategies, and what users write with torch's distributed checkpoint."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, load, save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from lightning_parallel import HybridStrategy, ZeroStrategy
from lightning_parallel.checkpoint.__main__ import main
from lightning_parallel.strategies.checkpoint.reading import numbered
from lightning_parallel.strategies.mesh_strategy import MeshStrategy
from tests.layouts import Layout, layouts
from tests.models import build, loaders
from tests.ranks import run_on_ranks
from tests.strategies.checkpoint.saves import Tied, tokens
from tests.strategies.one_and_two import made
from tests.tiers import sampled
from tests.trainers import trainer


class Sharded(Tied):
    """Divides itself where Lightning's strategy wants it; untied, for FSDP ties only within a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 9)
        self.metric = torch.nn.Identity()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for part in (self.table, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.head.parameters(), "lr": 0.2}, {"params": self.table.parameters()}]
        return torch.optim.AdamW(groups, lr=0.1)


def run(strategy: Any, epochs: int = 1) -> Trainer:
    warnings.filterwarnings("ignore")
    return trainer(strategy, max_epochs=epochs)


def written_by_lightning(folder: Path) -> None:
    for whole in (True, False):
        model = Sharded()
        fitting = run(ModelParallelStrategy(2, 1, save_distributed_checkpoint=not whole))
        fitting.fit(model, tokens())
        fitting.save_checkpoint(folder / ("whole.ckpt" if whole else "parts.ckpt"))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        states = get_optimizer_state_dict(model, fitting.optimizers[0], options=options)
        saved = {"model": get_model_state_dict(model, options=options), "optimizer": states["state"] if states else {}}
        if fitting.is_global_zero:
            torch.save(saved, folder / "expected")


def read_by_us(folder: Path, ranks: int) -> None:
    wanted = torch.load(folder / "expected", weights_only=True)
    make = HybridStrategy if ranks == 1 else partial(ZeroStrategy, 2, stage=2)
    ends = []
    for name in ("whole.ckpt", "one.ckpt"):
        model, fitting = Sharded(), run(make())
        fitting.fit(model, tokens(), ckpt_path=folder / name)
        assert fitting.global_step == 2
        for parameter, value in model.state_dict().items():
            assert torch.equal(value, wanted["model"][parameter]), parameter
        if ranks == 1:
            for parameter, value in model.named_parameters():
                for key, state in fitting.optimizers[0].state[value].items():
                    assert torch.equal(state, wanted["optimizer"][parameter][key]), (parameter, key)
        model = Sharded()
        run(make(), epochs=2).fit(model, tokens(), ckpt_path=folder / name)
        ends.append(model.state_dict())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert not torch.equal(ends[0]["head.weight"], wanted["model"]["head.weight"])
    with pytest.raises(ValueError, match=r"Reading its index may run any code.*checkpoint import .*parts.ckpt FILE"):
        run(make()).validate(Sharded(), tokens(), ckpt_path=folder / "parts.ckpt", verbose=False)


@sampled(1, "ranks", [1, 2])
def test_checkpoints_of_model_parallel_strategy_are_read(ranks: int, tmp_path: Path) -> None:
    """Files as they are; folders once they are converted, by the command that the error names."""
    run_on_ranks(2, written_by_lightning, tmp_path)
    main(["import", str(tmp_path / "parts.ckpt"), str(tmp_path / "one.ckpt")])
    run_on_ranks(ranks, read_by_us, tmp_path, ranks)


@pytest.mark.filterwarnings("ignore")
def test_folders_of_fsdp_strategy_are_converted(tmp_path: Path) -> None:
    """It calls the model otherwise; the strategy itself runs on GPUs only."""
    weight, moment = torch.randn(3, 2), torch.randn(3, 2)
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["layer.weight"]}]
    optimizer = {"state": {"layer.weight": {"exp_avg": moment, "step": torch.tensor(4.0)}}, "param_groups": groups}
    save({"model": {"layer.weight": weight}, "optimizer_0": optimizer}, checkpoint_id=tmp_path / "x", no_dist=True)
    torch.save({"global_step": 4}, tmp_path / "x" / "meta.pt")
    main(["import", str(tmp_path / "x"), str(tmp_path / "x.ckpt")])
    got = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert got["global_step"] == 4
    assert torch.equal(got["state_dict"]["layer.weight"], weight)
    state = numbered(got["optimizer_states"][0])
    assert torch.equal(state["state"][0]["exp_avg"], moment)
    assert state["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]
    with pytest.raises(SystemExit, match=r"is not a torch.distributed.checkpoint folder: it has no .metadata"):
        main(["import", str(tmp_path), str(tmp_path / "one.ckpt")])


LAYOUTS = {"one": Layout(1, 1, None)} | layouts("zero 3", "tensor parallel", "tensor x zero 3", "pipeline x tensor")


def full(trainer: Trainer, **options: Any) -> AbstractContextManager[None]:
    """Inside, parameters are plain full tensors on every rank, as on one device."""
    strategy = trainer.strategy
    return strategy.full_parameters(**options) if isinstance(strategy, MeshStrategy) else nullcontext()


class Saves(Callback):
    """On one rank: in hooks the world has the ranks that read different samples, and each of several would write."""

    def __init__(self, folder: Path, by_torch: bool) -> None:
        self.folder, self.by_torch = folder, by_torch

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        with full(trainer):
            state = get_model_state_dict(module) if self.by_torch else module.state_dict()
            if trainer.is_global_zero:
                save({"model": state}, checkpoint_id=self.folder, no_dist=True)
        trainer.strategy.barrier()


class Loads(Saves):
    """Before a step is taken."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        with full(trainer, writable=True):
            if self.by_torch:
                state = get_model_state_dict(module)
            else:
                state = {name: torch.full_like(value, 7) for name, value in module.state_dict().items()}
            load({"model": state}, checkpoint_id=self.folder)
            set_model_state_dict(module, state) if self.by_torch else module.load_state_dict(state)
        trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None: ...


class SavesParts(Saves):
    """Without `full_parameters`: hooks reach the ranks that read different samples, and others hold parts too."""

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        error = partial(pytest.raises, CheckpointException, match=r"the default group of this hook.*full_parameters")
        with error():
            save({"model": module.state_dict()}, checkpoint_id=self.folder)
        super().on_train_end(trainer, module)
        with error():
            load({"model": module.state_dict()}, checkpoint_id=self.folder)


def train(make: Callable[..., Any] | None, column: str, callback: Saves, seed: int) -> dict[str, Tensor]:
    """The weights at the end, as Lightning's checkpoint has them."""
    warnings.filterwarnings("ignore")
    run, path = trainer(made(make), callbacks=[callback], max_epochs=1), callback.folder.parent / "plain.ckpt"
    run.fit(build(column, seed), *loaders(column, 8, samples=16))
    run.save_checkpoint(path, weights_only=True)
    return torch.load(path, weights_only=True)["state_dict"]


@sampled(
    1,
    ("column", "writer", "reader", "by_torch"),  # maps of queries, keys and values, of gates and ups, as one
    [
        ("gpt2", "tensor x zero 3", "one", False),
        ("phi3", "one", "pipeline x tensor", True),
        ("gpt2", "zero 3", "tensor parallel", True),
        ("phi3", "pipeline x tensor", "zero 3", False),
        ("gpt2", "tensor parallel", "tensor x zero 3", True),
    ],
)
def test_weights_are_written_and_read_by_torch(tmp_path, column, writer, reader, by_torch):
    found = []
    for layout, callback, seed in ((writer, Saves, 0), (reader, Loads, 1)):
        ranks, _, make = LAYOUTS[layout]
        given = (make, column, callback(tmp_path / "parts", by_torch), seed)
        found.append(run_on_ranks(ranks, train, *given, timeout=60.0, limit=120.0)[0])
    written, read = found
    assert written.keys() == read.keys()
    assert [name for name in written if not torch.equal(written[name], read[name])] == []


def test_parts_of_which_other_ranks_hold_some_are_refused(tmp_path: Path) -> None:
    make = LAYOUTS["tensor parallel"].strategy
    run_on_ranks(2, train, make, "gpt2", SavesParts(tmp_path / "parts", False), 0, timeout=60.0, limit=120.0)
