"""What hooks do with a model between steps, and torch's own hooks on tensors: as on one device, or refused."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.heard import heard
from tests.layouts import LAYOUTS
from tests.ranks import run_on_ranks
from tests.strategies.between_steps.chains import LENGTH, WIDTH, Chain, Kind, check, fit
from tests.tiers import sampled


class Moves(Chain):
    """Takes the model elsewhere and back, while it has gradients."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            self.float()
            self.double()


class GoesBack(Chain):
    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 1:
            self.kept = {name: value.clone() for name, value in self.state_dict().items()}
        if self.global_step == 3:
            self.load_state_dict(self.kept)


class Copies(Chain):
    def on_train_batch_end(self, *_: Any) -> None:
        file = io.BytesIO()
        torch.save(self.layers[0], file)
        file.seek(0)
        for twin in torch.load(file, weights_only=False), copy.deepcopy(self.layers[0]):
            twin.down.weight.data.zero_()
            twin.down.bias.data.zero_()
            x = torch.ones(1, LENGTH, WIDTH)
            assert torch.equal(twin(x), x)
            self.seen.append([p.detach().norm().item() for p in twin.parameters()])


class Counts(Chain):
    """Has a hook of all optimizers, as profilers have."""

    def on_fit_start(self) -> None:
        self.handle = register_optimizer_step_post_hook(lambda *_: self.seen.append(1))

    def on_fit_end(self) -> None:
        self.handle.remove()


class Masks(Chain):
    """Trains every second element only."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            mask = torch.arange(parameter.numel()).view(parameter.shape) % 2
            parameter.register_hook(lambda gradient, mask=mask: gradient * mask)


class Averages(Chain):
    """Averages weights in a hook of the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.average = [parameter.detach().clone() for parameter in self.parameters()]
        optimizer.register_step_post_hook(self.follow)
        return optimizer

    @torch.no_grad()
    def follow(self, optimizer: Any, *_: Any) -> None:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for average, parameter in zip(self.average, self.parameters(), strict=True):
            average.lerp_(parameter, 0.5)
        self.seen.append([tensor.detach().norm().item() for tensor in (*self.average, *stepped)])


class HooksLate(Chain):
    def on_fit_start(self) -> None:
        self.stem.weight.register_hook(lambda gradient: gradient * 2)


class InBackward(Chain):
    """Steps each parameter as soon as it has its gradient."""

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.data.sub_(0.1 * p.grad))


class Ties(Chain):
    def on_train_batch_start(self, *_: Any) -> None:
        self.layers[1].up.weight = self.layers[0].up.weight


class Parametrizes(Chain):
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    def on_train_start(self) -> None:
        parametrize.register_parametrization(self.stem, "weight", self.Doubled())


EVERYWHERE: list[Kind] = [Moves, GoesBack, Copies, Counts]
WORKS = {
    "zero 2": [*EVERYWHERE, Masks, Averages, Ties, Parametrizes],
    "tensor parallel": EVERYWHERE,
    "zero 1, offloaded": [*EVERYWHERE, Masks, Averages, Ties, Parametrizes],
    "zero 3": EVERYWHERE,
}


@sampled(2, "layout", WORKS)
def test_models_changed_between_steps(layout: str) -> None:
    check(WORKS[layout], LAYOUTS[layout])


REFUSED = [
    (InBackward, "data parallel", "the torch hook on .* would see a part of its gradient, or none; read and change"),
    (Masks, "zero 3", "the torch hook on .* in on_before_optimizer_step, where every rank sees full"),
    (HooksLate, "zero 3", "the torch hook on stem.weight would see a part of its gradient"),
    (Masks, "tensor parallel", "the torch hook on"),
    (Averages, "zero 3", "the step hook of SGD would see the shards that each rank steps"),
    (Ties, "zero 3", "layers.1.up.weight"),
    (Parametrizes, "zero 3", "stem.weight"),
]


def refused() -> list[str]:
    """What is warned about where a hook is called with a part's gradients."""
    for kind, layout, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            fit(kind, LAYOUTS[layout].strategy, 2)
    with heard() as lines:
        fit(Masks, LAYOUTS["data parallel"].strategy, 2)
    return [line for line in lines if "hook" in line.lower()]


def test_hooks_that_would_see_a_part_are_refused() -> None:
    (message,), others = run_on_ranks(2, refused)
    assert "sees gradients of a part of the batch" in message
    assert others == []
