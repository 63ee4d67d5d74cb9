"""What hooks do with a model between steps, and torch's own hooks on tensors: as on one device, or refused."""

import io
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_parallel import DataParallelStrategy
from tests.layouts import layouts
from tests.models import Plain, loaders
from tests.ranks import on_one, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.tiers import sampled
from tests.trainers import trainer

LAYOUTS = layouts("data parallel", "zero 1, offloaded", "zero 3", "tensor parallel", "zero 2")
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Small(Plain):
    def __init__(self) -> None:
        super().__init__(SGD, blocks=2)
        self.seen: list[Any] = []

    def norms(self) -> list[float]:
        return [parameter.detach().norm().item() for parameter in self.parameters()]

    def end(self) -> None:
        """Takes back what it did to torch."""


class Moves(Small):
    """Takes the model elsewhere and back, while it has gradients."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            self.double()
            self.float()


class OtherMemory(Small):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.9


class GoesBack(Small):
    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 1:
            self.kept = {name: value.clone() for name, value in self.state_dict().items()}
        if self.global_step == 3:
            self.load_state_dict(self.kept)


class Copies(Small):
    def on_train_batch_end(self, *_: Any) -> None:
        file = io.BytesIO()
        torch.save(self.stem, file)
        file.seek(0)
        self.seen.append([p.detach().norm().item() for p in torch.load(file, weights_only=False).parameters()])


class Saves(Small):
    """Writes weights into the checkpoint by hand, and looks at them when it is read."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(self.norms())
        self.seen.append(checkpoint["mine"])


class Counts(Small):
    """Has a hook of all optimizers, as profilers have."""

    def on_fit_start(self) -> None:
        self.handle = register_optimizer_step_post_hook(lambda *_: self.seen.append(1))

    def on_fit_end(self) -> None:
        self.handle.remove()


class Masks(Small):
    """Trains every second element only."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            mask = torch.arange(parameter.numel()).view(parameter.shape) % 2
            parameter.register_hook(lambda gradient, mask=mask: gradient * mask)


class Averages(Small):
    """Averages weights in a hook of the optimizer."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        self.average = [parameter.detach().clone() for parameter in self.parameters()]
        configured["optimizer"].register_step_post_hook(self.follow)
        return configured

    @torch.no_grad()
    def follow(self, optimizer: Any, *_: Any) -> None:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for average, parameter in zip(self.average, self.parameters(), strict=True):
            average.lerp_(parameter, 0.5)
        self.seen.append([tensor.detach().norm().item() for tensor in (*self.average, *stepped)])


class HooksLate(Small):
    def on_fit_start(self) -> None:
        self.stem.weight.register_hook(lambda gradient: gradient * 2)


class InBackward(Small):
    """Steps each parameter as soon as it has its gradient."""

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: p.data.sub_(0.1 * p.grad))


class Ties(Small):
    def on_train_batch_start(self, *_: Any) -> None:
        self.blocks[1].up.weight = self.blocks[0].up.weight


class Doubled(nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight * 2


class Parametrizes(Small):
    def on_train_start(self) -> None:
        parametrize.register_parametrization(self.stem, "weight", Doubled())


EVERYWHERE = [Moves, OtherMemory, GoesBack, Copies, Saves, Counts]
WHOLE = [Masks, Averages, Ties, Parametrizes]
WORKS = {
    "data parallel": [Moves, Counts, Masks],
    "zero 1, offloaded": [*EVERYWHERE, *WHOLE],
    "zero 3": EVERYWHERE,
    "tensor parallel": EVERYWHERE,
    "zero 2": [*EVERYWHERE, *WHOLE],
}


def fit_all(kinds: list[type[Small]], strategy: Any, batch_size: int) -> list[Any]:
    return [fit(kind, strategy, batch_size) for kind in kinds]


def fit(kind: type[Small], strategy: Any, batch_size: int, **options: Any) -> Any:
    torch.manual_seed(0)
    module = kind()
    run = trainer(made(strategy), max_epochs=1, **options)
    data = loaders("plain", batch_size, samples=32, val_samples=8)
    run.fit(module, *data)
    module.end()
    if kind is Saves:
        path = Path(os.environ["RANKS_SCRATCH"], "mine.ckpt")
        run.save_checkpoint(path)
        trainer(made(strategy), max_epochs=1).fit(module, *data, ckpt_path=path, weights_only=True)
    return module.seen, {name: value.clone() for name, value in module.state_dict().items()}


@sampled(1, "layout", WORKS)
def test_what_is_done_between_steps_is_done_as_on_one_device(layout: str) -> None:
    _, readers, strategy = LAYOUTS[layout]
    for found in run_on_ranks(2, fit_all, WORKS[layout], strategy, 8 // readers):
        for kind, got in zip(WORKS[layout], found, strict=True):
            require_like(on_one(fit, kind, None, 8), got)


REFUSED = [
    (InBackward, "data parallel", "the hook of torch on .* would see a part of its gradient, or none; read and change"),
    (Masks, "zero 3", "the hook of torch on .* in on_before_optimizer_step, where they compute as the whole"),
    (HooksLate, "zero 3", "the hook of torch on stem.weight would see a part of its gradient"),
    (Masks, "tensor parallel", "the hook of torch on"),
    (Averages, "zero 3", "the step hook of SGD would see the shards that each rank steps"),
    (Ties, "zero 3", "blocks.1.up.weight"),
    (Parametrizes, "zero 3", "stem.weight"),
]


def refused(cases: list[tuple[type[Small], str]], strategy: Any) -> None:
    for kind, message in cases:
        module = kind()
        with pytest.raises(ValueError, match=message):
            trainer(strategy(), max_epochs=1).fit(module, *loaders("plain", 2, samples=8))
        module.end()


@sampled(1, "layout", ["zero 3", "data parallel", "tensor parallel"])
def test_what_would_see_a_part_is_refused_on_every_rank(layout: str) -> None:
    run_on_ranks(
        2, refused, [(kind, message) for kind, at, message in REFUSED if at == layout], LAYOUTS[layout].strategy
    )


def warned(strategy: Any) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_parallel").addHandler(handler)
    try:
        trainer(strategy(), max_epochs=1).fit(Masks(), *loaders("plain", 2, samples=8))
    finally:
        logging.getLogger("lightning_parallel").removeHandler(handler)
    return [message for message in told if "hook" in message.lower()]


def test_hooks_on_gradients_of_a_part_of_the_batch_are_told_once() -> None:
    (message,), others = run_on_ranks(2, warned, DataParallelStrategy)
    assert "sees gradients of a part of the batch" in message
    assert others == []
