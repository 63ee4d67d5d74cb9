"""Hooks that look at gradients, and learning rate finders, find on every rank what one device has."""

from typing import Any

import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from tests.models import build, loaders
from tests.strategies.between_steps.chains import LAYOUTS, Chain, Kind, check
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer


class Accumulates(Chain):
    """Clips what has been accumulated after each batch, and in the hook of clipping."""

    options = {"accumulate_grad_batches": 2}

    def on_after_backward(self) -> None:
        self.seen.append(float(torch.cat([parameter.grad.flatten() for parameter in self.parameters()]).abs().max()))
        self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)))
        self.layers[0].down.weight.grad.clamp_(-0.01, 0.01)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # gradient centralisation
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
            if name == "layers.1.up.bias":
                parameter.grad = parameter.grad.clone().clamp(-0.01, 0.01)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


class Anywhere(Chain):
    """Reads gradients in all the hooks in which they are there, and changes some."""

    def note(self, *_: Any) -> None:
        found = [parameter.grad for parameter in self.parameters()]
        norms = [0.0 if gradient is None else float(gradient.norm()) for gradient in found]
        self.seen.append([norms, float(grad_norm(self, 2).get("grad_2.0_norm_total", 0.0)), None in found])

    on_train_batch_start = on_before_zero_grad = on_validation_model_zero_grad = on_validation_start = note
    on_train_epoch_end = note

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

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
        self.layers[1].up.weight.grad *= 2
        self.layers[0].up.weight.grad = self.layers[0].up.weight.grad.clamp(-0.01, 0.01)
        self.stem.bias.grad = None
        self.note()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.note()
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class ByHand(Chain):
    """Manual optimization: logs numbers made of gradients, and looks at them after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.log("squares", sum((each * each).sum() for each in gradients))
        self.log("largest", torch.stack([each.abs().max() for each in gradients]).max())
        self.log("number", float(gradients[0].square().sum()))
        optimizer.step()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += [float(parameter.grad.norm()) for parameter in self.parameters()]
        self.seen.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


class Tunable(Chain):
    """Its learning rate is found first, and the run begins anew."""

    lr = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.finder = LearningRateFinder(min_lr=1e-3, max_lr=1.0, num_training_steps=4, early_stop_threshold=None)

    def configure_callbacks(self) -> Any:
        return [self.finder]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_train_end(self) -> None:
        self.seen += [self.lr, *([self.finder.optimal_lr.results["loss"]] if self.finder.optimal_lr else [])]


KINDS: dict[str, list[Kind]] = {
    "tensor x zero 2": [Accumulates, Anywhere, ByHand],
    "data parallel": [Accumulates, Anywhere, ByHand],
    "zero 1": [Accumulates, Anywhere, ByHand],
    "tensor parallel": [Tunable, Anywhere, ByHand],
    "tensor x zero 3 in units": [ByHand, Accumulates],
    "zero 3": [Accumulates, Anywhere, ByHand],
}


@sampled(2, "layout", KINDS)
def test_gradients_look_whole_in_hooks(layout: str) -> None:
    check(KINDS[layout], layout)


def finding_of_fused(strategy: Any) -> Any:
    model = build("gpt2", n_layer=1)
    model.lr = 0.1
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    tuner, data = Tuner(trainer(made(strategy), max_epochs=1)), loaders("gpt2", 8, samples=16, val_samples=8)
    results = tuner.lr_find(model, *data, num_training=2, early_stop_threshold=None).results
    for name, value in model.state_dict().items():  # they are taken back
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    return results["loss"]


def test_learning_rate_finder_with_fused_weights() -> None:
    assert_like_one_device(finding_of_fused, 2, (None,), (LAYOUTS["tensor parallel"].strategy,))
