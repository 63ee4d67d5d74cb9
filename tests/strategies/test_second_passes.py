"""Steps of optimizers that compute the gradients of a batch twice, the second time at other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    DataParallel,
    ExpertParallel,
    HybridStrategy,
    PipelineParallel,
    TensorParallel,
    Zero,
)
from tests.ranks import RanksFailed, begun_on_one, run_on_ranks
from tests.tiers import covering
from tests.trainers import trainer

SAMPLES, WIDTH = 21, 12


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, chosen = self.gate(y).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(y[rows]) * weights[rows, which, None])
        return x + out


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers = nn.Linear(4, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.head, self.losses, self.norms = nn.Linear(WIDTH, 3), list[float](), list[float]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))


class SharpnessAware(Model):
    """Goes up the gradient by a step of one length, and down from where it was by the gradient that is there."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        parameters = [p for p in self.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        self.norms.append(float(norm))
        with torch.no_grad():
            moves = [p.grad * (0.1 / norm) for p in parameters]
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        optimizer_closure()
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.sub_(move)
        optimizer.step()


class RestoresCopies(Model):
    """Keeps the weights as they were, moves by groups, and lets the optimizer call the second pass."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        kept = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept[parameter] = parameter.detach().clone()
                    parameter.data += 0.1 * parameter.grad / (parameter.grad.abs().max() + 1e-3)
        optimizer.zero_grad()

        def again() -> Any:
            loss = optimizer_closure()
            for parameter, value in kept.items():
                parameter.data.copy_(value)
            return loss

        optimizer.step(closure=again)


class MixesGradients(Model):
    """Steps by a mean of both gradients, of which it makes new ones; an optimizer that looks at whole matrices."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms += [
            float(parameter.grad.norm()) for parameter in self.layers.parameters() if parameter.grad is not None
        ]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        parameters = [p for p in self.parameters() if p.grad is not None]
        first = [p.grad.clone() for p in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.01)
        optimizer.zero_grad()
        optimizer_closure()
        for parameter, gradient in zip(parameters, first, strict=True):
            parameter.data /= 1.01
            parameter.grad = 0.3 * gradient + 0.7 * parameter.grad
        optimizer.step()


class SAM(torch.optim.Optimizer):
    """The optimizer class that is often copied."""

    def __init__(self, parameters: Any, rho: float = 0.1, **kwargs: Any) -> None:
        super().__init__(parameters, {"rho": rho, **kwargs})
        self.base = torch.optim.SGD(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.stack(
            [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        )
        for group in self.param_groups:
            scale = group["rho"] / (norm.norm() + 1e-12)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["old"] = parameter.data.clone()
                    parameter.add_(parameter.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = self.state[parameter]["old"]
        self.base.step()
        if zero_grad:
            self.zero_grad()

    def second_pass(self, net: nn.Module, scaled: Any, *, closure: Any) -> None:
        """Computes the second gradients itself, and looks at the model meanwhile."""
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.copy_(scaled(parameter.grad, len(net.layers)))
        self.second_step(zero_grad=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step(zero_grad=True)
        closure()
        self.second_step()
        return loss


class OfAClass(Model):
    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), lr=0.05, momentum=0.9)


class InTwoCalls(OfAClass):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.first_step(zero_grad=True)
        optimizer_closure()
        optimizer.second_step(zero_grad=True)


class OfNamedClosure(OfAClass):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.first_step(zero_grad=True)
        optimizer.second_pass(self, lambda gradient, parts: gradient / parts, closure=optimizer_closure)


KINDS: list[type[Model]] = [SharpnessAware, RestoresCopies, MixesGradients, OfNamedClosure, OfAClass, InTwoCalls]
LAYOUTS: dict[str, tuple[int, int, list[Any]]] = {
    "zero 2": (2, 2, [Zero(2, stage=2)]),
    "tensor": (2, 1, [TensorParallel(2)]),
    "expert": (2, 2, [DataParallel(2), ExpertParallel(2)]),
    "zero 3": (2, 2, [Zero(2)]),
    "zero 1": (2, 2, [Zero(2, stage=1)]),
    "data": (2, 2, [DataParallel(2)]),
    "tensor and zero 2": (4, 2, [TensorParallel(2), Zero(2, stage=2)]),
    "tensor and zero 3": (4, 2, [TensorParallel(2), Zero(2)]),
    "expert and zero 3": (4, 4, [Zero(4), ExpertParallel(2)]),
}


def trained(kind: Callable[[], Model], techniques: list[Any], batch: int, **run: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    model = kind()
    random = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=random), torch.randint(3, (SAMPLES,), generator=random))
    fitting = trainer(HybridStrategy(*techniques), max_epochs=2, precision="64-true", **run)
    fitting.fit(model, DataLoader(data, batch))
    return model.losses, model.norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def require_alike(layout: str, kind: type[Model], **run: Any) -> None:
    ranks, readers, techniques = LAYOUTS[layout]
    expected = begun_on_one(trained, kind, [], 8, **run)
    for found in run_on_ranks(ranks, trained, kind, techniques, 8 // readers, **run):
        for one, other in zip(found, expected.result(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@covering(keep=1, layout=LAYOUTS, kind=KINDS)
def test_two_passes_train_as_on_one_device(layout: str, kind: type[Model]) -> None:
    require_alike(layout, kind)


@covering(keep=1, layout=["zero 2", "tensor", "tensor and zero 3", "zero 1"], kind=KINDS[:3])
def test_so_they_do_with_accumulation_and_clipping(layout: str, kind: type[Model]) -> None:
    require_alike(layout, kind, accumulate_grad_batches=2, gradient_clip_val=0.3)


@covering(keep=1, ranks=[2, 4], kind=KINDS[:3], run=[{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}])
def test_so_they_do_in_a_pipeline(ranks: int, kind: type[Model], run: dict[str, Any]) -> None:
    expected = begun_on_one(trained, kind, [], 8, **run)
    techniques = [PipelineParallel(2), Zero(2, stage=2)][: ranks // 2]
    for found in run_on_ranks(ranks, trained, kind, techniques, 16 // ranks, **run):
        for one, other in zip(found, expected.result(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_an_optimizer_that_looks_at_all_gradients_is_refused_in_a_pipeline() -> None:
    with pytest.raises(RanksFailed, match=r"SAM is not known to step each parameter by itself, .* or ZeroStrategy"):
        run_on_ranks(2, trained, InTwoCalls, [PipelineParallel(2)], 8)
