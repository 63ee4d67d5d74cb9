"""Work of a user between forward and step, by hand or in hooks, gives the weights of one device."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import DataParallel, HybridStrategy, ZeroStrategy
from lightning_parallel.techniques.zero.sharded import parameters as zero_parameters
from tests.layouts import LAYOUTS
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer


def network(inputs: int, inner: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, inner), nn.Tanh(), nn.Linear(inner, outputs))


def adamw(parameters: Iterable[Any]) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.02, eps=1e-4, weight_decay=0.1)


class Two(LightningModule):
    """Two networks, as a GAN has; what one step does differs by subclass."""

    automatic = False
    optimizers_made = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = self.automatic
        self.generator, self.critic = network(5, 7, 5), network(5, 3, 1)

    def configure_optimizers(self) -> Any:
        if self.optimizers_made == 1:
            return adamw(self.parameters())
        return adamw(self.generator.parameters()), adamw(self.critic.parameters())

    def fool(self, x: Tensor) -> Tensor:
        return F.softplus(-self.critic(self.generator(x))).mean()

    def tell(self, x: Tensor) -> Tensor:
        return F.softplus(self.critic(self.generator(x).detach())).mean() + F.softplus(-self.critic(x)).mean()


class Accumulating(Two):
    """Two backward passes before a step, over two batches, without zeroing in between."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        one, other = self.optimizers()
        self.manual_backward(self.tell(batch[0]) / 2)
        self.manual_backward(self.fool(batch[0]) / 2)
        if batch_idx % 2:
            for optimizer in (one, other):
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()


class TwoBackwards(Two):
    """Two passes before a step; one rank alone uses a scalar."""

    optimizers_made = 1

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer, (x, kinds) = self.optimizers(), batch
        optimizer.zero_grad()
        self.manual_backward(self.fool(x))
        told = self.critic(x)
        told = torch.where(kinds[:, None] > 0, told * self.scale, told) if kinds.any() else told
        self.manual_backward(told.square().mean())
        optimizer.step()


class WithClosure(Two):
    """A closure handed to `step`."""

    optimizers_made = 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.fool(batch[0])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class SteppedBlocks(Two):
    """Nothing but blocks, for which ranks may wait one by one, stepped before the forward of a batch is over."""

    optimizers_made = 1

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.ModuleList(network(5, 7, 5) for _ in range(3)), nn.Identity()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer, hidden = self.optimizers(), batch[0]
        for block in self.generator:
            hidden = hidden + block(hidden)
        loss = hidden.square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Automatic(Two):
    automatic = True
    optimizers_made = 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.fool(batch[0])


class UnusedEverywhere(Automatic):
    """The critic has weight decay, but no gradient: it must not move."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.generator(batch[0]).square().mean()


class MostlyFrozen(Automatic):
    """Small trained parts beside a frozen network, as LoRA adds them, in an optimizer over all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.critic(self.generator(batch[0]) + self.up(self.down(batch[0]))).square().mean()


class OwnHooks(Automatic):
    """Overrides everything around the step, and reads gradients in it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norms", torch.zeros(0))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)

    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]
        shown = [norm.full_tensor() if isinstance(norm, torch.distributed.tensor.DTensor) else norm for norm in norms]
        self.norms = torch.cat([self.norms, torch.stack(shown).norm().detach().reshape(1).cpu()])


class Unfreezing(BaseFinetuning):
    """The generator joins after an epoch."""

    def freeze_before_training(self, module: LightningModule) -> None:
        self.freeze(module.generator)

    def finetune_function(self, module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.generator, optimizer, lr=0.01)


class Blocks(Automatic):
    """Blocks that a strategy may wrap one by one, thawed after an epoch; the user checkpoints them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.ModuleList(network(5, 7, 5) for _ in range(3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden, kinds = batch
        for block in self.generator:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return (self.critic(hidden).squeeze(-1) * (kinds + 1)).square().mean()

    def configure_optimizers(self) -> Any:
        return adamw(parameter for parameter in self.parameters() if parameter.requires_grad)

    def configure_callbacks(self) -> Any:
        return [Unfreezing()]


KINDS = [
    Accumulating, TwoBackwards, WithClosure, UnusedEverywhere, MostlyFrozen, OwnHooks, Blocks,
    SteppedBlocks,
]  # fmt: skip
OF_OFFLOAD = [Accumulating, WithClosure, OwnHooks, Blocks]
"""Those that move, read or freeze what offloading keeps elsewhere."""


def fit_all(kinds: list[type[LightningModule]], strategy: Callable[[], Any] | None, ranks: int) -> dict[str, Any]:
    return {kind.__name__: fit(kind, strategy, ranks) for kind in kinds}


def fit(kind: type[LightningModule], strategy: Callable[[], Any] | None, ranks: int) -> dict[str, Tensor]:
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    kinds = torch.tensor([0, 0, 1, 1] * 2)  # in every global batch, rank 0 reads one kind and rank 1 the other
    model, data = kind(), DataLoader(TensorDataset(inputs, kinds), 4 // ranks)
    trainer(made(strategy), max_epochs=2).fit(model, data)
    if kind is UnusedEverywhere:
        assert torch.equal(model.critic[0].weight, kind().critic[0].weight)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@sampled(
    1,
    ("layout", "kinds"),
    [
        ("zero 3", KINDS),
        ("zero 1", KINDS),
        ("zero 2", KINDS),
        ("data parallel", KINDS),
        ("zero 2, offloaded", OF_OFFLOAD),
    ],
)
def test_steps_of_every_kind_train_as_on_one_device(layout: str, kinds: list[type[LightningModule]]) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(fit_all, ranks, (kinds, None, 1), (kinds, strategy, readers), rtol=1e-4, atol=1e-6)


class BlocksByHand(Blocks):
    """Two backward passes through the blocks within one step, and one step between them."""

    automatic = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


def fit_in_units(kinds: list[type[LightningModule]], strategy: Callable[[], Any] | None, ranks: int) -> dict[str, Any]:
    """ZeRO-3 as large models see it: blocks are gathered one by one, not with the whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_parameters, "UNIT_BYTES", 64)
        return fit_all(kinds, strategy, ranks)


def test_blocks_in_units_train_as_on_one_device() -> None:
    kinds = [Blocks, BlocksByHand]
    assert_like_one_device(fit_in_units, 2, (kinds, None, 1), (kinds, ZeroStrategy, 2), rtol=1e-4, atol=1e-6)


class Copying(Automatic):
    """Learns to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.generator(batch[0]), batch[0])
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))


def losses_of_compressions(*compressions: str | None) -> list[list[float]]:
    data = TensorDataset(torch.randn(16, 5, generator=torch.Generator().manual_seed(1)))
    models = [Copying() for _ in compressions]
    for model, compression in zip(models, compressions, strict=True):
        strategy = HybridStrategy(DataParallel(2, compression=compression))
        trainer(strategy, max_epochs=10).fit(model, DataLoader(data, 4))
    return [model.losses for model in models]


def test_compressed_gradients_train_almost_as_exact_ones() -> None:
    exact, *others = run_on_ranks(2, losses_of_compressions, None, "bf16", "fp16")[0]
    assert exact[-1] < 0.6 * exact[0]
    for got in others:
        assert got[-1] == pytest.approx(exact[-1], rel=0.01)
        assert got != exact


class Plainly(Two):
    """Goes back past the strategy."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.tell(batch[0]).backward()


def refused(strategy: Any) -> None:
    data = DataLoader(TensorDataset(torch.randn(8, 5)), 4)
    with pytest.raises(RuntimeError, match=r"call self\.manual_backward\(loss\)"):
        trainer(made(strategy), max_epochs=1).fit(Plainly(), data)


@sampled(1, "layout", ["zero 3", "data parallel", "zero 2", "tensor parallel"])
def test_plain_backward_is_refused(layout: str) -> None:
    ranks, _, strategy = LAYOUTS[layout]
    run_on_ranks(ranks, refused, strategy)
