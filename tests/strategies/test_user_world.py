"""The world that user code sees is the ranks that read different samples; what a step decides by them is checked."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import ParallelPlan, PipelineParallel, Zero
from tests.curves import compare_weights
from tests.layouts import Layout, hybrid, layouts
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer

STEPS = {"training_step", "validation_step"}
HOOKS = ("on_fit_start", "on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_train_end")


class Noting(Callback):
    """Notes what the world is in each hook."""

    def __init__(self) -> None:
        self.worlds: dict[str, tuple[int, int, int]] = {}

    def note(self, hook: str, run: Trainer) -> None:
        there = dist.is_initialized()
        self.worlds[hook] = dist.get_world_size() if there else 1, dist.get_rank() if there else 0, run.world_size

    def on_train_batch_start(self, run: Trainer, *_: Any) -> None:
        self.note("callback", run)


class Contrastive(LightningModule):
    """Gathers the samples of the other ranks for its loss, and scales its rate by the world size."""

    def __init__(self, noting: Noting) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.noting = noting

    def setup(self, stage: str) -> None:
        self.noting.note("setup", self.trainer)

    def loss(self, x: Tensor) -> Tensor:
        z = self.layers(x)
        others = z.detach()
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts = [torch.empty_like(others) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, others.contiguous())
            others = torch.cat(parts)
        return (z @ others.T).logsumexp(-1).mean()

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        self.noting.note("training_step", self.trainer)
        loss = self.loss(x)
        self.log("loss", loss)
        return loss

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.noting.note("validation_step", self.trainer)
        self.log("val", self.loss(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.noting.note("configure_optimizers", self.trainer)
        batch = self.trainer.fit_loop._data_source.instance.batch_size * self.trainer.world_size
        return torch.optim.SGD(self.parameters(), 0.01 * batch, momentum=0.9)


for _hook in HOOKS:
    setattr(Contrastive, _hook, lambda self, *_, hook=_hook: self.noting.note(hook, self.trainer))


def fitted(strategy: MakeStrategy | None, readers: int) -> Any:
    noting = Noting()
    module, random = Contrastive(noting), torch.Generator().manual_seed(1)
    data = DataLoader(torch.randn(24, 8, generator=random).double(), 8 // readers)
    run = trainer(made(strategy), callbacks=[noting], max_epochs=2, precision="64-true", gradient_clip_val=0.5)
    run.fit(module, data, data)
    mine = getattr(run.strategy, "data_parallel_size", 1), getattr(run.strategy, "data_parallel_rank", 0)
    after = dist.get_world_size() if dist.is_initialized() else 1
    return module.state_dict(), float(run.callback_metrics["val"]), noting.worlds, mine, after


LAYOUTS = layouts("tensor x zero 3", "pipeline over the batch") | {
    "layers x zero 1": Layout(4, 2, hybrid(PipelineParallel(2, microbatches=1), Zero(2, stage=1)))
}


@sampled(1, "layout", LAYOUTS)
def test_world_that_a_loss_and_a_learning_rate_see(layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    expected = begun_on_one(fitted, None, 1)
    got = run_on_ranks(ranks, fitted, strategy, readers)
    assert sorted(run[3] for run in got) == sorted(
        [(readers, reader) for reader in range(readers)] * (ranks // readers)
    )
    for rank, (weights, val, worlds, (_, reader), after) in enumerate(got):
        assert set(worlds.values()) == {(readers, reader, readers)}
        # what a step notes in an object stays on the ranks of a pipeline's last stage
        assert worlds.keys() - STEPS == {*HOOKS, "callback", "configure_optimizers", "setup"}
        assert any(other.keys() >= STEPS for _, _, other, mine, _ in got if mine[1] == reader)
        assert after == ranks
        compare_weights(expected.result()[0], weights, 1e-9, where=f"rank {rank}: ")
        assert val == pytest.approx(expected.result()[1], rel=1e-9)


class Decides(LightningModule):
    """Learns faster where the loss is larger, "own" of the rank's rows, or of "all"; or torch "cycles" its rate."""

    def __init__(self, by: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by = by
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        if self.by != "cycles":
            known = float(self.all_gather(loss.detach()).mean() if self.by == "all" else loss)
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * known / (1 + known)
        return loss

    def configure_optimizers(self) -> Any:
        if self.by != "cycles":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.1))
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


def trained(by: str, strategy: MakeStrategy | None, batch_size: int) -> Any:
    samples = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    module = Decides(by)
    trainer(made(strategy), max_epochs=1).fit(module, DataLoader(TensorDataset(samples), batch_size))
    return {name: value.clone() for name, value in module.state_dict().items()}


RATES = layouts("data parallel", "zero 3") | layouts("pipeline", plan=ParallelPlan(blocks="layers.*"))


def refused() -> None:
    for _, readers, strategy in RATES.values():
        with pytest.raises(ValueError, match=r"learning rates.*same on all ranks.*rank 0: \[0\..*rank 1.*all_gather"):
            trained("own", strategy, 4 // readers)


@pytest.mark.filterwarnings("ignore")
def test_rates_of_a_rank_s_own_loss_are_refused() -> None:
    """In a pipeline only the last stage comes to it."""
    run_on_ranks(2, refused)


@sampled(1, ("layout", "by"), [("zero 3", "all"), ("pipeline", "cycles"), ("data parallel", "all")])
def test_rates_that_are_the_same_on_all_ranks(layout: str, by: str) -> None:
    _, readers, strategy = RATES[layout]
    assert_like_one_device(trained, 2, (by, None, 4), (by, strategy, 4 // readers))
