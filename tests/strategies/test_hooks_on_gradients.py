"""Hooks that look at gradients, and callbacks that act on parameters, find on every rank what one device has."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm

from tests.curves import Curve, Recorder, compare
from tests.layouts import layouts
from tests.models import Plain, build, loaders
from tests.ranks import begun_on_one, on_one, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.tiers import sampled
from tests.trainers import trainer

LAYOUTS = layouts("data parallel", "zero 1", "zero 2", "zero 3", "tensor parallel", "tensor x zero 2")


def check(run: Any, layout: str, **options: Any) -> None:
    n, data_ranks, strategy = LAYOUTS[layout]
    begun = begun_on_one(run, None, 8, **options)
    for rank, (got, *found) in enumerate(run_on_ranks(n, run, strategy, 8 // data_ranks, **options)):
        expected, *others = begun.result()
        compare(expected, got, where=f"rank {rank}: ")
        require_like(others, found)


def fitted(
    model: LightningModule, strategy: Any, batch_size: int, callbacks: Any = (), shuffle: bool = True, **options: Any
) -> Curve:
    torch.manual_seed(0)
    recorder = Recorder()
    run = trainer(made(strategy), callbacks=[recorder, *callbacks], **options)
    run.fit(model, *loaders("plain", batch_size, samples=16, val_samples=8, shuffle=shuffle))
    recorder.curve.weights.update({name: value.detach().clone() for name, value in model.state_dict().items()})
    return recorder.curve


def small(kind: type[Plain]) -> Any:
    torch.manual_seed(0)
    return kind(partial(torch.optim.SGD, lr=0.1, momentum=0.9), blocks=2)


class Looking(Plain):
    """Reads, replaces, changes and clips gradients, as users write it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.largest: list[float] = []

    def on_after_backward(self) -> None:
        gradients = torch.cat([parameter.grad.flatten() for parameter in self.parameters()])
        self.largest.append(gradients.abs().max().item())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # gradient centralisation
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
            if name == "blocks.1.up.bias":
                parameter.grad = parameter.grad.clone().clamp(-0.01, 0.01)
            parameter.grad *= 0.9

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5))
        self.clip_gradients(optimizer, gradient_clip_val=0.4, gradient_clip_algorithm="norm")


def looking(strategy: Any, batch_size: int) -> Any:
    model = small(Looking)
    return fitted(model, strategy, batch_size, max_epochs=1), model.largest


@sampled(1, "layout", LAYOUTS)
def test_gradients_look_whole_to_hooks(layout: str) -> None:
    check(looking, layout)


class ClippingEach(Plain):
    """Clips what has been accumulated after each batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)))
        self.blocks[0].down.weight.grad.clamp_(-0.01, 0.01)


def accumulating(strategy: Any, batch_size: int) -> Any:
    model = small(ClippingEach)
    return fitted(model, strategy, batch_size, max_epochs=2, accumulate_grad_batches=2), model.norms


@sampled(1, "layout", LAYOUTS)
def test_so_they_look_while_they_accumulate(layout: str) -> None:
    check(accumulating, layout)


class Tunable(Plain):
    def configure_optimizers(self) -> Any:
        self.lr = vars(self).get("lr", 0.1)
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)


def finding(strategy: Any, batch_size: int, shuffle: bool) -> Any:
    model = small(Tunable)
    model.lr = 0.1
    found = LearningRateFinder(min_lr=1e-3, max_lr=1.0, num_training_steps=5, early_stop_threshold=None)
    got = fitted(model, strategy, batch_size, [found], shuffle, max_epochs=2)
    return got, found.optimal_lr.results["loss"], model.lr


def test_learning_rate_finder_restores_the_run() -> None:
    check(finding, "tensor parallel", shuffle=True)


def finding_of_fused(strategy: Any) -> Any:
    model = build("gpt2", n_layer=1)
    model.lr = 0.1
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    data = loaders("gpt2", 8, samples=16, val_samples=8)
    results = (
        Tuner(trainer(made(strategy), max_epochs=1))
        .lr_find(model, *data, num_training=2, early_stop_threshold=None)
        .results
    )
    for name, value in model.state_dict().items():  # they are taken back
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    return results["loss"]


def test_learning_rate_finder_with_fused_weights() -> None:
    for found in run_on_ranks(2, finding_of_fused, LAYOUTS["tensor parallel"][2]):
        assert found == pytest.approx(on_one(finding_of_fused, None), rel=1e-5)


class LooksAnywhere(Plain):
    """Reads gradients in all the hooks in which they are there, and changes some."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[Any] = []

    def note(self) -> None:
        found = [parameter.grad for parameter in self.parameters()]
        norms = [0.0 if gradient is None else float(gradient.norm()) for gradient in found]
        self.seen.append([norms, float(grad_norm(self, 2).get("grad_2.0_norm_total", 0.0)), None in found])

    def on_train_batch_start(self, *_: Any) -> None:
        self.note()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.note()
        if batch_idx % 2:
            self.stem.weight.grad = None
            optimizer.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()
        self.note()

    def on_train_batch_end(self, *_: Any) -> None:
        self.note()
        self.blocks[1].up.weight.grad *= 2
        self.blocks[0].up.weight.grad = self.blocks[0].up.weight.grad.clamp(-0.01, 0.01)
        self.stem.bias.grad = None
        self.note()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.note()
        scheduler.step()

    def on_validation_model_zero_grad(self) -> None:
        self.note()

    def on_validation_start(self) -> None:
        self.note()

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.note()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def looking_anywhere(strategy: Any, batch_size: int, **options: Any) -> Any:
    model = small(LooksAnywhere)
    return fitted(model, strategy, batch_size, max_epochs=2, **options), model.seen


@sampled(1, "layout", LAYOUTS)
def test_gradients_look_whole_in_all_hooks(layout: str) -> None:
    check(looking_anywhere, layout)


class LooksOutside(Plain):
    """Manual optimization, and a look at gradients after the step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(output["loss"])
        optimizer.step()
        return output

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += [float(parameter.grad.norm()) for parameter in self.parameters()]


def looking_outside(strategy: Any, batch_size: int) -> Any:
    model = small(LooksOutside)
    return fitted(model, strategy, batch_size, max_epochs=1), model.seen


@sampled(2, "layout", LAYOUTS)
def test_gradients_look_whole_after_a_manual_step(layout: str) -> None:
    check(looking_outside, layout)
