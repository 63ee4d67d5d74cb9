"""Helpers, averages, loggers and closures use a pipeline's parameters between steps as on one device."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import HybridStrategy, PipelineParallel, PipelineParallelStrategy, TensorParallel, Zero
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.trainers import trainer

LAYOUTS: dict[str, Any] = {
    "pipeline": (2, 1, partial(PipelineParallelStrategy, 2, microbatches=2)),
    "zero 1": (4, 2, lambda: HybridStrategy(PipelineParallel(2, microbatches=2), Zero(2, stage=1))),
    "zero 3": (4, 2, lambda: HybridStrategy(PipelineParallel(2, microbatches=2), Zero(2))),
    "tensor parallel": (4, 1, lambda: HybridStrategy(PipelineParallel(2, microbatches=2), TensorParallel(2))),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(LightningModule):
    """Predicts words by the weight that embeds them, which two stages hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.layers = nn.Embedding(19, 8), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Seeing(Callback):
    """Notes numbers that it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


class Helper(Seeing):
    """A helper object made before the model is divided, which reads the module later."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.norm = lambda: sum(float(p.detach().pow(2).sum()) for p in pl_module.parameters()) ** 0.5

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        count = sum(p.numel() for p in pl_module.parameters())
        self.seen.append([self.norm(), count, next(pl_module.parameters()).detach().flatten()[:2].tolist()])


class ByHand(Seeing):
    """An average of weights, kept by names, which takes the place of the weights while others look at them."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for name, p in pl_module.named_parameters():
                self.average[name].mul_(0.5).add_(p, alpha=0.5)
        self.seen.append([float(value.norm()) for value in self.average.values()])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for name, p in pl_module.named_parameters():
                p.copy_(self.average[name])


class Averaged(Seeing):
    """`AveragedModel`, and its forward."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.averaged = AveragedModel(copy.deepcopy(pl_module.layers), avg_fn=get_ema_avg_fn(0.5))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.averaged.update_parameters(pl_module.layers)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        x = torch.linspace(-1, 1, 8, dtype=torch.float64)
        with torch.no_grad():
            for layer in self.averaged.module:
                x = layer(x)
        self.seen.append([x, [p.detach().norm() for p in self.averaged.parameters()]])


class Watching(Seeing):
    """What `wandb.watch` does: histograms of weights and of gradients."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for name, p in pl_module.named_parameters():
            gradient = p.grad
            flat = p.detach().cpu().flatten()
            self.seen.append([len(name), torch.histc(flat, 8, -1, 1), float(flat.min()), gradient is None])
            if gradient is not None:
                self.seen.append([torch.histc(gradient.detach().cpu(), 8, -1, 1), gradient.abs().max().item()])


class Norms(Seeing):
    """Lightning's `grad_norm`, and clipping by hand."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        before = grad_norm(pl_module, 2)
        total = nn.utils.clip_grad_norm_(pl_module.parameters(), 0.05)
        self.seen.append([{k: float(v) for k, v in before.items()}, float(total)])
        self.seen.append([float(v) for v in grad_norm(pl_module, 2).values()])


class Writing(Seeing):
    """Clamps, freezes, draws noise, and calls the module."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in pl_module.parameters():
                p.clamp_(-0.4, 0.4)
            pl_module.layers[3].up.weight[0].zero_()
            pl_module.layers[0].down.weight.data *= 0.9
            nn.init.normal_(pl_module.layers[2].norm.bias, std=0.01)
            self.seen.append(pl_module(torch.arange(6)[None]))
        pl_module.layers[1].up.requires_grad_(batch_idx % 2 == 1)
        self.seen.append([p.requires_grad for p in pl_module.parameters()])


LOOKERS = {kind.__name__: kind for kind in (Helper, ByHand, Averaged, Watching, Norms, Writing)}


def seen(strategy: Any, readers: int, looker: str) -> Any:
    random, module, callback = torch.Generator().manual_seed(1), Words(), LOOKERS[looker]()
    data = TensorDataset(*(torch.randint(19, (24, 6), generator=random) for _ in range(2)))
    run = trainer(made(strategy), callbacks=[callback], precision="64-true", max_epochs=2, use_distributed_sampler=True)
    torch.manual_seed(7)
    run.fit(module, DataLoader(data, 8 // readers))
    values = {name: value.clone() for name, value in module.state_dict().items()}
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in module.parameters())
    return _plain(callback.seen), values


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return torch.as_tensor(value).detach().double().clone() if isinstance(value, (Tensor, float)) else value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("looker", LOOKERS)
def test_what_code_between_steps_sees_and_writes_is_as_on_one_device(looker: str, layout: str) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    expected = begun_on_one(seen, None, 1, looker)
    for found in run_on_ranks(ranks, seen, strategy, readers, looker):
        require_like(expected.result(), found)
