"""Checkpoints of Lightning's own strategies: files are read on any layout; folders are converted first."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from lightning_parallel import HybridStrategy, ZeroStrategy
from lightning_parallel.checkpoint.__main__ import main
from lightning_parallel.strategies.checkpoint.reading import numbered
from tests.ranks import run_on_ranks
from tests.strategies.test_checkpoint_use import Tied, tokens
from tests.tiers import sampled
from tests.trainers import trainer


class Sharded(Tied):
    """Divides itself where Lightning's strategy wants it; untied, for FSDP ties only within a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(6, 9)
        self.metric = torch.nn.Identity()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.table(batch[0])), batch[0])

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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    run_on_ranks(2, written_by_lightning, folder)
    main(["import", str(folder / "parts.ckpt"), str(folder / "one.ckpt")])
    return folder


@sampled(1, "ranks", [1, 2])
def test_what_model_parallel_strategy_wrote_is_read(written: Path, ranks: int) -> None:
    run_on_ranks(ranks, read_by_us, written, ranks)


@pytest.mark.filterwarnings("ignore")
def test_what_fsdp_strategy_wrote_is_converted(tmp_path: Path) -> None:
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


def refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"whose index may run any code .*checkpoint import .*parts.ckpt FILE"):
        run(HybridStrategy()).validate(Sharded(), tokens(), ckpt_path=folder / "parts.ckpt", verbose=False)


def test_a_folder_of_torch_is_refused_with_the_command_that_converts_it(written: Path) -> None:
    run_on_ranks(1, refused, written)


def test_a_folder_without_an_index_is_not_converted(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"is no folder of torch.distributed.checkpoint: it has no .metadata"):
        main(["import", str(tmp_path), str(tmp_path / "one.ckpt")])
