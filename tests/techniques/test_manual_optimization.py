"""Whatever a user does between forward and step, by hand or in hooks, gives the weights of one device."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import DataParallel, DataParallelStrategy, HybridStrategy, ZeroStrategy
from lightning_parallel.techniques.zero.sharded import parameters as zero_parameters
from tests.curves import compare_weights
from tests.ranks import run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer

LAYOUTS: dict[str, Callable[[], Any]] = {
    "zero_1": partial(ZeroStrategy, 2, stage=1),
    "data_parallel": partial(DataParallelStrategy, 2),
    "zero_2": partial(ZeroStrategy, 2, stage=2),
    "zero_3": partial(ZeroStrategy, 2, stage=3),
    "offload_1": partial(ZeroStrategy, 2, stage=1, offload=True),
    "offload_2": partial(ZeroStrategy, 2, stage=2, offload=True),
    "offload_3": partial(ZeroStrategy, 2, stage=3, offload=True),
}


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


class Gan(Two):
    """Two forwards, two backwards, two steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        one, other = self.optimizers()
        for optimizer, loss in ((one, self.fool), (other, self.tell)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(batch[0]))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)


class FrozenByHand(Two):
    """A GAN whose author freezes the other network within the step, and leaves it frozen there."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, loss, frozen in zip(self.optimizers(), (self.fool, self.tell), self.others(), strict=True):
            self.requires_grad_(True)
            frozen.requires_grad_(False)
            self.manual_backward(loss(batch[0]))
            optimizer.step()
            optimizer.zero_grad()

    def others(self) -> tuple[nn.Module, nn.Module]:
        return self.critic, self.generator


class Accumulating(Two):
    """Two backward passes before a step, over two batches, without zeroing in between."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        one, other = self.optimizers()
        self.manual_backward(self.tell(batch[0]) / 2)
        self.manual_backward(self.fool(batch[0]) / 2)
        if batch_idx % 2:
            for optimizer in (one, other):
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


class SeveralSteps(Two):
    """Several steps of the critic in one training step, each seeing what the one before did."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        one, other = self.optimizers()
        for _ in range(3):
            other.zero_grad()
            self.manual_backward(self.tell(batch[0]))
            other.step()
        one.zero_grad()
        self.manual_backward(self.fool(batch[0]))
        one.step()


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


class Searching(WithClosure):
    """A closure that is evaluated again, for which ranks must hold whole parameters."""

    def configure_optimizers(self) -> Any:
        return optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


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


class UnusedSomewhere(Automatic):
    """A rank's samples decide which parts it uses."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, kinds = batch
        used = [network(inputs[kinds == kind]).sum() for kind, network in self.by_kind() if (kinds == kind).any()]
        return torch.stack(used).sum() / len(inputs)

    def by_kind(self) -> list[tuple[int, nn.Module]]:
        return [(0, self.generator), (1, self.critic)]


class Frozen(Automatic):
    def configure_optimizers(self) -> Any:
        self.generator.requires_grad_(False)
        return adamw(parameter for parameter in self.parameters() if parameter.requires_grad)


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


class Finetuned(Automatic):
    def configure_optimizers(self) -> Any:
        return adamw(parameter for parameter in self.parameters() if parameter.requires_grad)

    def configure_callbacks(self) -> Any:
        return [Unfreezing()]


KINDS = [
    Gan, FrozenByHand, Accumulating, TwoBackwards, SeveralSteps, WithClosure, UnusedEverywhere,
    UnusedSomewhere, Frozen, MostlyFrozen, OwnHooks, Finetuned, Blocks, SteppedBlocks,
]  # fmt: skip


BESIDE_OFFLOAD = [Gan, FrozenByHand, WithClosure, UnusedSomewhere, OwnHooks, Finetuned]
"""Those that move, read or freeze what offloading keeps elsewhere."""


def fit_all(
    kinds: list[type[LightningModule]], make_strategy: Callable[[], Any] | str = "auto", ranks: int = 1
) -> dict[str, Any]:
    return {kind.__name__: fit(kind, make_strategy, ranks) for kind in kinds}


def fit(kind: type[LightningModule], make_strategy: Callable[[], Any] | str, ranks: int) -> dict[str, Tensor]:
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    kinds = torch.tensor([0, 0, 1, 1] * 2)  # in every global batch, rank 0 reads one kind and rank 1 the other
    data = DataLoader(TensorDataset(inputs, kinds), 4 // ranks)
    model = kind()
    trainer(make_strategy if isinstance(make_strategy, str) else make_strategy(), max_epochs=2).fit(model, data)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return run_on_ranks(1, fit_all, [*KINDS, Searching])[0]


@sampled(1, "layout", LAYOUTS)
def test_all_kinds_of_steps(layout: str, expected: dict[str, Any]) -> None:
    kinds = BESIDE_OFFLOAD if layout in ("offload_1", "offload_2") else KINDS
    kinds = [*kinds, Searching] if layout == "data_parallel" else kinds
    for rank, found in enumerate(run_on_ranks(2, fit_all, kinds, LAYOUTS[layout], 2)):
        assert len(found) == len(kinds)
        for kind, weights in found.items():
            compare_weights(expected[kind], weights, 1e-4, f"{kind}, rank {rank}: ")


def fit_in_units(kinds: list[type[LightningModule]]) -> dict[str, Any]:
    """ZeRO-3 as large models see it: blocks are gathered one by one, not with the whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_parameters, "UNIT_BYTES", 64)
        return {kind.__name__: fit(kind, LAYOUTS["zero_3"], 2) for kind in kinds}


class BlocksByHand(Blocks):
    """Two backward passes through the blocks within one step, and one step between them."""

    automatic = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


def test_blocks_in_units(expected: dict[str, Any]) -> None:
    by_hand = run_on_ranks(1, fit, BlocksByHand, "auto", 1)[0]
    for found in run_on_ranks(2, fit_in_units, [Blocks, BlocksByHand]):
        compare_weights(expected["Blocks"], found["Blocks"], 1e-4)
        compare_weights(by_hand, found["BlocksByHand"], 1e-4)


def test_what_is_unused_on_one_device_does_not_move(expected: dict[str, Any]) -> None:
    start = UnusedEverywhere().state_dict()
    assert torch.equal(expected["UnusedEverywhere"]["critic.0.weight"], start["critic.0.weight"])


def compressed(compression: str | None) -> list[float]:
    """Losses of a network that learns to copy."""
    losses: list[float] = []

    class Copying(Automatic):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = F.mse_loss(self.generator(batch[0]), batch[0])
            self.log("train_loss", loss)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            losses.append(float(self.trainer.callback_metrics["train_loss"]))

    inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    strategy = HybridStrategy(DataParallel(2, compression=compression))
    trainer(strategy, max_epochs=10).fit(Copying(), DataLoader(TensorDataset(inputs), 4))
    return losses


def exact_and_compressed(compression: str) -> tuple[list[float], list[float]]:
    return compressed(None), compressed(compression)


@sampled(1, "compression", ["bf16", "fp16"])
def test_compressed_gradients_train_almost_as_well(compression: str) -> None:
    exact, got = run_on_ranks(2, exact_and_compressed, compression)[0]
    assert exact[-1] < 0.6 * exact[0]
    assert got[-1] == pytest.approx(exact[-1], rel=0.01)
    assert got != exact
