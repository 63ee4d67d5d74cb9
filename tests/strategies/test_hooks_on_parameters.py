"""Hooks that look at parameters, or call the model, find on every rank what one device has; what they write stays."""

import copy
import dis
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor

from lightning_parallel import HybridStrategy, PipelineParallel, PipelineParallelStrategy, TensorParallelStrategy, Zero
from lightning_parallel.strategies.hooks.looking import looks_at_model
from tests.models import Plain, loaders
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.tiers import sampled
from tests.trainers import trainer

LAYOUTS: dict[str, Any] = {
    "pipeline": (2, 1, partial(PipelineParallelStrategy, 2, microbatches=2)),
    "zero 3": (2, 2, lambda: HybridStrategy(Zero(2))),
    "tensor parallel": (2, 1, partial(TensorParallelStrategy, 2)),
    "zero 3 beside": (4, 2, lambda: HybridStrategy(PipelineParallel(2, microbatches=2), Zero(2))),
}


def require_as_on_one(run: Callable[..., Any], layout: str) -> None:
    n, data_ranks, strategy = LAYOUTS[layout]
    expected = begun_on_one(run, None, 8)
    for found in run_on_ranks(n, run, strategy, 8 // data_ranks):
        require_like(expected.result(), found)


class Averaging(Callback):
    """A copy of the weights, as callbacks keep it."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.copy = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.copy[name].lerp_(parameter.detach(), 0.5)


class Looks(Plain):
    """Reads, averages and writes weights, and calls the model, as users write it."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.average = copy.deepcopy(self.blocks).requires_grad_(False)
        self.seen: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for average, parameter in zip(self.average.parameters(), self.blocks.parameters(), strict=True):
                average.mul_(0.5).add_(parameter, alpha=0.5)
        self.log("norm", torch.stack([parameter.detach().norm() for parameter in self.parameters()]).norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        ratio = [float(p.detach().norm() / p.grad.norm()) for p in self.parameters() if p.grad is not None]
        self.seen.append(sum(ratio))

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        self.seen.append(torch.histc(self.blocks[1].up.weight.float(), 5))
        self.seen.append([part.clone() for part in self(torch.ones(2, 13))])
        for parameter in self.blocks.parameters():
            parameter.clamp_(-0.2, 0.2)


def looked(strategy: Any, batch_size: int) -> Any:
    torch.manual_seed(0)
    module, averaging = Looks(), Averaging()
    run = trainer(made(strategy), max_epochs=2, callbacks=[averaging])
    run.fit(module, *loaders("plain", batch_size, samples=16, val_samples=8))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return module.seen, float(run.callback_metrics["norm"]), state, averaging.copy


@sampled(1, "layout", LAYOUTS)
def test_hooks_find_and_change_the_parameters_of_one_device(layout: str) -> None:
    require_as_on_one(looked, layout)


class LooksInGroups(Plain):
    """Asks optimizers for parameters: projects weights, adds those that were frozen, changes to another optimizer."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.stem.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.01)

    def on_train_epoch_start(self) -> None:
        used = self.optimizers().optimizer
        if self.current_epoch == 1:
            self.stem.requires_grad_(True)
            known = {id(parameter) for group in used.param_groups for parameter in group["params"]}
            used.add_param_group({"params": [p for p in self.parameters() if id(p) not in known], "lr": 0.02})
        elif self.current_epoch == 2:
            self.trainer.optimizers = [torch.optim.RMSprop(self.parameters(), lr=0.001)]

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(parameter.sign(), alpha=0.01)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            for parameter in group["params"]:
                parameter.div_(parameter.norm().clamp(min=1.0))


def grouped(strategy: Any, batch_size: int) -> Any:
    torch.manual_seed(0)
    module = LooksInGroups()
    run = trainer(made(strategy), max_epochs=3)
    run.fit(module, *loaders("plain", batch_size, samples=16, val_samples=8))
    (optimizer,) = run.optimizers
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    return held, {name: value.clone() for name, value in module.state_dict().items()}


@sampled(1, "layout", LAYOUTS)
def test_hooks_find_and_add_the_parameters_of_one_device_in_groups(layout: str) -> None:
    require_as_on_one(grouped, layout)


class Saves(Callback):
    """Saves and resumes optimizers in hooks that look at parameters, on which they are whole."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.norm = sum(float(parameter.detach().norm()) for parameter in pl_module.parameters())
        self.kept = [*trainer.optimizers[0].state_dict()["state"]]
        trainer.save_checkpoint(f"{trainer.default_root_dir}/saved.ckpt")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.norm = sum(float(parameter.detach().norm()) for parameter in pl_module.parameters())
        saved = trainer.strategy.load_checkpoint(f"{trainer.default_root_dir}/saved.ckpt")
        trainer.strategy.load_optimizer_state_dict(saved)
        self.states = saved["optimizer_states"][0]["state"]


def saving(strategy: Any, batch_size: int) -> Any:
    torch.manual_seed(0)
    saves = Saves()
    run = trainer(made(strategy), max_epochs=1, callbacks=[saves])
    run.fit(Plain(blocks=2), *loaders("plain", batch_size, samples=16, val_samples=8))
    return saves.norm, saves.states


@sampled(1, "layout", LAYOUTS)
def test_hooks_that_look_at_parameters_save_and_load_optimizers(layout: str) -> None:
    require_as_on_one(saving, layout)


def average(module: Any) -> float:
    return float(sum(parameter.mean() for parameter in module.parameters()))


class Silent(Plain):
    """Hooks that need no parameter."""

    average = 0.0  # no call of the function of this name

    def on_train_batch_start(self, *_: Any) -> None:
        self.average += 1.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        print("epoch", self.current_epoch)

    def on_validation_epoch_end(self) -> None:
        self.helps()

    def helps(self) -> None:
        self.log("norm", sum(parameter.norm() for parameter in self.parameters()))


def test_only_hooks_that_look_are_shown_the_whole_model() -> None:
    module = Silent()
    parts = {name for name, _ in module.named_children()}
    looks = partial(looks_at_model, module=module, parts=parts)
    for hook in ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"):
        assert not looks(module, hook)
    assert looks(module, "on_validation_epoch_end")
    assert looks(Averaging(), "on_train_batch_end")
    assert not looks(LearningRateMonitor(), "on_train_batch_start")


class HandsOn(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None: ...


PYTHONS = {
    "3.12": [("LOAD_FAST", "pl_module"), ("LOAD_FAST", "batch_idx"), ("CALL", 2)],
    "3.13": [("LOAD_FAST_LOAD_FAST", ("pl_module", "batch_idx")), ("CALL", 2)],
    "3.13, after a store": [("STORE_FAST_LOAD_FAST", ("kept", "pl_module")), ("CALL", 1)],
    "3.14": [("LOAD_FAST_BORROW_LOAD_FAST_BORROW", ("batch_idx", "pl_module")), ("CALL", 2)],
}


@pytest.mark.parametrize("python", PYTHONS)
def test_pythons_that_load_two_variables_at_once_show_who_is_given_the_model(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks(*steps: tuple[str, Any]) -> bool:
        found = [SimpleNamespace(opname=name, argval=value) for name, value in [("LOAD_GLOBAL", "update"), *steps]]
        monkeypatch.setattr(dis, "get_instructions", lambda _: found)
        return looks_at_model(HandsOn(), "on_train_batch_end", Silent(), set())

    assert looks(*PYTHONS[python])
    assert not looks(("LOAD_FAST_LOAD_FAST", ("trainer", "pl_module")), ("LOAD_ATTR", "current_epoch"))
    assert not looks(("STORE_FAST_STORE_FAST", ("pl_module", "trainer")), ("LOAD_CONST", ("pl_module", "a")))
