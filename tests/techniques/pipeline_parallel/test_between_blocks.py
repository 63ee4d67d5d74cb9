"""Work of steps between the blocks of a pipeline: shared parts, early losses, tensors made like weights, hooks."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import HybridStrategy, LayerParallelStrategy, PipelineParallel, PipelineParallelStrategy
from tests.layouts import PP2, TP2
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer

WORDS, WIDTH, IGNORED = 23, 8, -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.map = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.mix(self.norm(x))
        scores = y @ y.mT if mask is None else (y @ y.mT).masked_fill(~mask, -1e9)
        return x + self.map(F.gelu(scores.softmax(-1) @ y))

    @torch.no_grad()
    def limit(self) -> None:
        self.map.weight.clamp_(-0.2, 0.2)
        self.mix.weight[:3] *= 0.9
        self.mix.bias.data.mul_(0.99)


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.seen: list[float] = []
        self.blocks, self.criterion = nn.ModuleList(Block() for _ in range(4)), nn.CrossEntropyLoss()

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.of_targets(self.norm(x), labels)

    def of_targets(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.head(x).mT, labels)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NormGoesOn(Language):
    """The final norm is that of the first block, too, and what it makes between blocks is used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].norm = self.norm

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, kept = self.words(tokens), []
        for block in self.blocks:
            x = block(x)
            kept.append(self.norm(x))
        return self.of_targets(kept[0] + self.norm(x), labels)


class EarlyExit(Language):
    """A loss over targets after the second block, and the last one."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, early = self.words(tokens), []
        for block in self.blocks:
            x = block(x)
            early.append(self.of_targets(x, labels))
        self.log("early", early[1])
        last = self.of_targets(self.norm(x), labels)
        return early[1] + 0.5 * last if self.training else last


class AsksWeights(Language):
    """Makes tensors where weights are, of first and last stages, and like them; limits weights after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = [block.limit for block in self.blocks]

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        first, last = self.words.weight, self.blocks[3].map.weight
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=first.device).tril()
        x = self.words(tokens.to(last.device)) + last.new_tensor([0.5]) + torch.zeros_like(last)[0]
        places = torch.arange(length, device=self.head.weight.device).to(self.head.weight)
        x = x + places[:, None].type_as(first) / 10 + self.norm.weight.new_ones(WIDTH) * first.new_full((), 0.1)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.of_targets(self.norm(x), labels.to(first.device))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for limit in self.limits:
            limit()


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class RunAgain(torch.autograd.Function):
    """Runs a layer again in backward, and a backward pass within its own, after the manner of reversible layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.count = layer, len(parameters)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None, *[None] * ctx.count


class Again(Block):
    """A block that runs its last part within a backward pass again, outside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = FeedForward()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        return x + RunAgain.apply(x, self.feed, *self.feed.parameters())


class RunsAgain(Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Again() for _ in range(4))


class Clamping(Block):
    """Clamps the gradients that pass through it: what is left of them depends on how large they are."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return x


class Clamps(Language):
    """Gradients within its blocks must have the size of one device, as they have with a single microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Clamping() for _ in range(4))


class Residual(Language):
    """What words become is used after every block, and so is a mask of them within."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = first = self.words(tokens)
        mask = first @ first.mT > -1
        for block in self.blocks:
            x = first + block(x, mask)
        return self.of_targets(self.norm(x), labels)


class HooksReturnNew(Residual):
    """What they return goes on, and to the next hook, which keeps it."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.words, *self.blocks, self.norm):
            module.register_forward_hook(lambda _, args, output: output * 1.5)
            module.register_forward_hook(lambda _, args, output: self.kept.append(output))
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0] * 0.5, *args[1:]))
            block.map.register_forward_hook(lambda _, args, output: (output, args[0].mean(-1, keepdim=True)))
            block.map.register_forward_hook(lambda _, args, output: output[0] + output[1])

    def of_targets(self, x: Tensor, labels: Tensor) -> Tensor:
        assert len(self.kept) == 2 + len(self.blocks)
        return super().of_targets(torch.stack([(k + 1) * one for k, one in enumerate(self.kept)]).sum(0) / 9, labels)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.kept: list[Tensor] = []
        return super().loss(tokens, labels)


class ReadsGradients(Language):
    """Reads the gradient of the batch before in its step, and all gradients before they are set to zero."""

    def of_targets(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.training:
            before = self.head.weight.grad
            self.log("before", 0.0 if before is None else before.norm(), on_step=False, on_epoch=True, reduce_fx="max")
        return super().of_targets(x, labels)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        self.seen += [0.0 if gradient is None else float(gradient.norm()) for gradient in gradients]


PIPELINES: dict[str, MakeStrategy] = {
    "1f1b": partial(PipelineParallelStrategy, 2, microbatches=2),
    "zbv": partial(PipelineParallelStrategy, 2, schedule="zbv", microbatches=4),
    "layers": partial(LayerParallelStrategy, 2),
    "tensor": partial(HybridStrategy, PP2, TP2),
    "layers x tensor": partial(HybridStrategy, PipelineParallel(2, microbatches=1), TP2),
}


def batches(samples: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (samples, 6), generator=generator)
    labels = tokens.roll(-1, 1).masked_fill(tokens > tokens[:, :1], IGNORED)  # of some samples nearly all
    return DataLoader(TensorDataset(tokens, labels), 8)


def trained(strategy: MakeStrategy | None, model: type[Language]) -> Any:
    warnings.filterwarnings("ignore", ".*not enough steps to properly record|.*Profiler clears events")  # torch 2.11
    module, hooks = model(), {"profiler": "pytorch"} if strategy and model is Residual else {}
    run = trainer(made(strategy), max_epochs=2, precision="64-true", **hooks)
    run.fit(module, batches(24, 1), batches(16, 2))
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return metrics, module.seen, {name: value.detach().clone() for name, value in module.state_dict().items()}


@sampled(
    2,
    ("model", "layout"),
    [
        (AsksWeights, "zbv"),
        (NormGoesOn, "zbv"),
        (EarlyExit, "1f1b"),
        (RunsAgain, "zbv"),
        (ReadsGradients, "1f1b"),
        (ReadsGradients, "zbv"),
        (RunsAgain, "tensor"),
        (Clamps, "layers"),
        (Clamps, "layers x tensor"),
        (HooksReturnNew, "zbv"),
        (Residual, "1f1b"),  # with the profiler of PyTorch, which hooks every module
    ],
)
def test_steps_around_blocks_train_as_on_one_device(model: type[Language], layout: str) -> None:
    ranks = 4 if "tensor" in layout else 2
    assert_like_one_device(trained, ranks, (None, model), (PIPELINES[layout], model))
