"""Lists, helpers, closures and optimizers that hold parameters compute with what ranks keep of them."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.techniques.tools.moved import Place, current, follow, is_moved, places
from tests.strategies.test_orders_of_steps import LENGTH, WIDTH, Chain, Layer, check
from tests.tiers import sampled


class Average:
    def __init__(self, parameters: Any) -> None:
        self.parameters = [parameters]


class Holds(Chain):
    """Takes parameters before ranks divide them: for a penalty, for what decays, and for its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.take()

    def take(self) -> None:
        self.ups = {"up": [layer.up.weight for layer in self.layers]}
        self.decays, self.average = {*self.ups["up"]}, Average(tuple(self.parameters()))
        first = self.layers[0].down.weight
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


LAYOUT_NAMES = "zero 2", "zero 3, recomputed", "tensor parallel", "pipeline of replicas"


@sampled(2, "layout", LAYOUT_NAMES)
def test_what_holds_parameters_computes_with_those_of_the_module(layout: str) -> None:
    check(Holds, layout)


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
            self.seen.append(sum(float(each.norm() + each.grad.abs().sum()) for each in ups))
            self.seen.append(float((ups[0] - self.start).norm()))

    def teardown(self, stage: str) -> None:
        vars(self).pop("start")


@sampled(2, "layout", ["zero 2", "zero 3, recomputed", "tensor parallel", "pipeline", "pipeline of replicas"])
def test_what_was_taken_while_configure_model_built_is_read_in_steps_and_hooks(layout: str) -> None:
    check(BornInAList, layout)


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


class MadeEarly(Chain):
    """Makes its optimizer in `__init__`, before ranks divide the parameters."""

    make: Any = partial(torch.optim.Adam, lr=0.01)

    def __init__(self) -> None:
        super().__init__()
        last = self.layers[-1].parameters()
        self.optimizer = self.make([*self.layers[:-1].parameters()])
        self.optimizer.add_param_group({"params": [*last], "lr": 0.02})

    def configure_optimizers(self) -> Any:
        return [self.optimizer], [torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)]


class OwnMadeEarly(MadeEarly):
    make = Halves


EARLY = [
    *((MadeEarly, layout) for layout in ("zero 3", "tensor parallel", "pipeline")),
    *((OwnMadeEarly, layout) for layout in ("zero 3", "pipeline")),
]


@pytest.mark.parametrize(("kind", "layout"), EARLY)
def test_an_optimizer_made_before_the_module_is_divided_steps_what_replaced_its_parameters(
    kind: type[Chain], layout: str
) -> None:
    check(kind, layout)


class Stepped(MadeEarly):
    """Its optimizer has states before ranks divide the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.double()(torch.ones(1, LENGTH, WIDTH).double()).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("layout", ["zero 3", "tensor parallel", "pipeline"])
def test_an_optimizer_that_stepped_before_the_module_is_divided_goes_on(layout: str) -> None:
    check(Stepped, layout)


def moved() -> tuple[nn.Module, Any]:
    module = nn.Sequential(nn.Linear(3, 2))
    old: Any = module[0].weight
    made = nn.Parameter(old.detach().clone())
    place = next(place for place, parameter in places(module).items() if parameter is old)
    place.put(made)
    follow(old, place)
    return module, old


def test_the_old_object_stands_for_what_is_in_its_place() -> None:
    module, old = moved()
    assert is_moved(old)
    assert isinstance(old, nn.Parameter)
    assert old.shape == (2, 3)
    (old * 2).sum().backward()
    assert current(old) is module[0].weight
    assert torch.equal(module[0].weight.grad, torch.full((2, 3), 2.0))
    assert old.grad is module[0].weight.grad
    with torch.no_grad():
        torch._foreach_mul_([old], 0.0)
        old.data[0] = 3
    assert module[0].weight.tolist() == [[3.0] * 3, [0.0] * 3]
    old.requires_grad_(False)
    assert not module[0].weight.requires_grad
    module[0].weight = nn.Parameter(torch.ones(2, 3))
    assert float(old.detach().sum()) == 6


def test_copies_of_the_old_object_are_copies_of_what_replaced_it() -> None:
    module, old = moved()
    for twin in copy.deepcopy(old), pickle.loads(pickle.dumps(old)):
        assert type(twin) is nn.Parameter
        assert torch.equal(twin, old)
    held = copy.deepcopy({"module": module, "held": [old]})
    assert held["held"][0] is held["module"][0].weight


def test_a_recurrent_layer_computes_with_what_is_put_there() -> None:
    layer = nn.LSTM(2, 2)
    place = Place(layer, "weight_ih_l0", "weight_ih_l0")
    place.put(nn.Parameter(torch.zeros(8, 2)))
    assert layer._flat_weights[0] is layer.weight_ih_l0
