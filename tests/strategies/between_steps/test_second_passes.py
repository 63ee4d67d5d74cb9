"""Steps of optimizers that compute the gradients of a batch twice, the second time at other weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.strategies.between_steps.chains import LAYOUTS, Chain, check, fit
from tests.tiers import sampled


class SharpnessAware(Chain):
    """Goes up the gradient by a step of one length, and down from where it was by the gradient that is there."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        parameters = [p for p in self.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        self.seen.append(float(norm))
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


class RestoresCopies(Chain):
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


class MixesGradients(Chain):
    """Steps by a mean of both gradients, of which it makes new ones, while batches accumulate."""

    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}

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
        self.seen += [float(p.grad.norm()) for p in parameters]
        optimizer.step()


class SAM(torch.optim.SGD):
    """The class that is often copied, in short."""

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad * 0.1 / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = self.state[parameter]["old"]
        super().step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class OfAClass(Chain):
    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), lr=0.05, momentum=0.9)


class InTwoCalls(OfAClass):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.first_step()
        optimizer_closure()
        optimizer.second_step()


NAMES = (
    "tensor x zero 3",
    "data parallel",
    "zero 2",
    "zero 3",
    "tensor parallel",
    "pipeline x data parallel",
    "pipeline",
)


@sampled(2, "layout", NAMES)
def test_second_passes_train_as_on_one_device(layout: str) -> None:
    own = [] if "pipeline" in layout else [OfAClass] if layout == "data parallel" else [InTwoCalls]
    check([SharpnessAware, RestoresCopies, MixesGradients, *own], layout)


def refused() -> None:
    with pytest.raises(RuntimeError, match="SAM evaluates its closure again within one step, but ranks hold shards"):
        fit(OfAClass, LAYOUTS["zero 3"].strategy, 6)
    says = r"SAM is not known to step each parameter by itself, .* or ZeroStrategy"
    with pytest.raises((ValueError, RuntimeError), match=says):
        fit(InTwoCalls, LAYOUTS["pipeline"].strategy, 6)


def test_optimizers_of_all_gradients_are_refused() -> None:
    """Where they run a closure again on shards, and in a pipeline."""
    run_on_ranks(2, refused)
