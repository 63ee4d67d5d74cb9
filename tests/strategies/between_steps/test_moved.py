"""Lists, helpers, closures and optimizers that hold parameters compute with what ranks keep of them."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.tools.replaced_parameters import Place
from tests.strategies.between_steps.chains import LENGTH, WIDTH, Chain, Layer, check
from tests.tiers import sampled


class Holds(Chain):
    """Takes parameters before ranks divide them: for a penalty, for what decays, and for its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.take()

    def take(self) -> None:
        self.ups: Any = {"up": [layer.up.weight for layer in self.layers]}
        self.decays, self.average = {*self.ups["up"]}, SimpleNamespace(parameters=[tuple(self.parameters())])
        first: Any = self.layers[0].down.weight
        self.of_first = partial(lambda scale: scale * first.square().mean(), 0.5)
        for layer in self.layers:
            vars(layer.down.weight)["flagged"] = True

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        kept = [parameter for parameter in self.average.parameters[0] if parameter in self.decays]
        penalty = sum(parameter.abs().sum() for parameter in kept) + self.ups["up"][-1].square().sum() + self.of_first()
        flagged = [parameter for parameter in self.parameters() if "flagged" in vars(parameter)]
        penalty = penalty + sum(parameter.square().sum() for parameter in flagged)
        return super().training_step(batch, batch_idx) + 0.01 * penalty

    def on_train_end(self) -> None:
        assert self.ups["up"][0].shape == self.layers[0].up.weight.shape

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.average.parameters[0], lr=0.1)


class BornInAList(Holds):
    """Takes parameters while `configure_model` builds, and reads them in steps, in hooks, and when the run is over."""

    def __init__(self) -> None:
        Chain.__init__(self)
        del self.layers

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer() for _ in range(4))
            self.take()

    def on_fit_start(self) -> None:
        self.start = self.ups["up"][0].detach().clone()

    def on_train_batch_end(self, *_: Any) -> None:
        ups = self.ups["up"]
        with torch.no_grad():
            ups[1].mul_(0.9)
            ups[2][0] += 0.1
            torch._foreach_mul_([ups[0]], 0.9)
            ups[3].data[0] = 0.1
            self.seen.append(sum(float(each.norm() + each.grad.abs().sum()) for each in ups))
            self.seen.append(float((ups[0] - self.start).norm()))
            self.seen += [float(twin.norm()) for twin in copy.deepcopy(ups)]

    def teardown(self, stage: str) -> None:
        vars(self).pop("start")


class Halves(torch.optim.SGD):
    """Scales the gradients of the parameters that it keeps in a list of its own."""

    steps_each_parameter = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.halved = self.param_groups[0]["params"][::2]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for parameter in self.halved:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        super().step()
        return loss


class OwnMadeEarly(Chain):
    """Makes its optimizer in `__init__`, before ranks divide the parameters."""

    make: Any = Halves

    def __init__(self) -> None:
        super().__init__()
        last = self.layers[-1].parameters()
        self.optimizer = self.make([*self.layers[:-1].parameters()])
        self.optimizer.add_param_group({"params": [*last], "lr": 0.02})

    def configure_optimizers(self) -> Any:
        return [self.optimizer], [torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)]


class Stepped(OwnMadeEarly):
    """Its optimizer has states before ranks divide the parameters."""

    make = partial(torch.optim.Adam, lr=0.01)

    def __init__(self) -> None:
        super().__init__()
        self.double()(torch.ones(1, LENGTH, WIDTH).double()).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@sampled(2, "layout", ["zero 3, recomputed", "zero 2", "tensor parallel", "pipeline", "pipeline x data parallel"])
def test_parameters_held_before_the_module_is_divided(layout: str) -> None:
    check([Holds, BornInAList, *([] if layout == "tensor parallel" else [OwnMadeEarly]), Stepped], layout)


def test_recurrent_layer_computes_with_what_is_put_there() -> None:
    layer = nn.LSTM(2, 2)
    place = Place(layer, "weight_ih_l0", "weight_ih_l0")
    place.put(nn.Parameter(torch.zeros(8, 2)))
    assert layer._flat_weights[0] is layer.weight_ih_l0
