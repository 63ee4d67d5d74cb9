"""Parameters that a module has in lists, helpers and functions of its own, beside its tree, follow what ranks keep."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.strategies.build import beside, within
from tests.ranks import run_on_ranks
from tests.strategies.test_orders_of_steps import LAYOUTS, LENGTH, WIDTH, Chain, check, trained
from tests.tiers import sampled


class Average:
    def __init__(self, parameters: Any) -> None:
        self.parameters = [parameters]

    def step(self, rate: float) -> None:
        for parameter in self.parameters[0]:
            parameter.mul_(1 - rate)


class Beside(Chain):
    """Takes parameters before ranks divide them: for a penalty, for what decays, and for what a hook reads."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = {"up": [layer.up.weight for layer in self.layers]}
        self.decays, self.average = {*self.ups["up"]}, Average(tuple(self.parameters()))
        first = self.layers[0].down.weight
        self.of_first = partial(lambda scale: scale * first.square().mean(), 0.5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        kept = [parameter for parameter in self.average.parameters[0] if parameter in self.decays]
        penalty = sum(parameter.abs().sum() for parameter in kept) + self.ups["up"][-1].square().sum() + self.of_first()
        return super().training_step(batch, batch_idx) + 0.01 * penalty

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        self.seen.append(float(sum(parameter.detach().norm() for parameter in self.ups["up"])))
        with torch.no_grad():
            self.average.step(0.01)

    def on_train_end(self) -> None:
        assert self.ups["up"][0].shape == self.layers[0].up.weight.shape

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.average.parameters[0], lr=0.1)


class Late(Beside):
    """Takes some when the run begins, and in its first step."""

    def on_train_start(self) -> None:
        self.late = [self.layers[1].down.weight]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        vars(self).setdefault("taken", (self.layers[2].up.bias,))
        late = self.late[0].square().sum() + vars(self)["taken"][0].exp().sum()
        return super().training_step(batch, batch_idx) + 0.01 * late


class Named(Chain):
    """Tells parameters apart by `id` and by attributes: for a penalty, for gradients, for groups of its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.named = {*map(id, self.layers[1].parameters())}
        for layer in self.layers:
            vars(layer.down.weight)["flagged"] = True

    def flagged(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if "flagged" in vars(parameter)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        kept = self.flagged() + [parameter for parameter in self.parameters() if id(parameter) in self.named]
        return super().training_step(batch, batch_idx) + 0.01 * sum(parameter.square().sum() for parameter in kept)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.flagged():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    def on_train_end(self) -> None:
        assert len(self.flagged()) == len(self.layers)

    def configure_optimizers(self) -> Any:
        groups: dict[float, list[nn.Parameter]] = {0.1: [], 0.02: [], 0.05: []}
        flagged = {*self.flagged()}
        for parameter in self.parameters():
            groups[0.02 if id(parameter) in self.named else 0.05 if parameter in flagged else 0.1].append(parameter)
        return torch.optim.SGD([{"params": some, "lr": lr} for lr, some in groups.items()])


CASES = [
    *((Beside, layout) for layout in ("zero 2", "zero 3, recomputed", "tensor parallel", "pipeline of replicas")),
    *((Late, layout) for layout in ("zero 3, recomputed", "tensor parallel")),
    *((Named, layout) for layout in ("zero 2", "zero 3, recomputed", "tensor parallel", "pipeline of replicas")),
]


@sampled(1, ("kind", "layout"), CASES)
def test_they_are_those_that_ranks_compute_with(kind: type[Chain], layout: str) -> None:
    check(kind, layout)


class Halves(torch.optim.SGD):
    """Scales the gradients of the parameters that it keeps in a list of its own."""

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


EARLY = [*((MadeEarly, layout) for layout in ("zero 3", "tensor parallel", "pipeline")), (OwnMadeEarly, "pipeline")]


@pytest.mark.parametrize(("kind", "layout"), EARLY)
def test_an_optimizer_made_before_the_module_is_divided_steps_what_replaced_its_parameters(
    kind: type[Chain], layout: str
) -> None:
    check(kind, layout)


class Stepped(MadeEarly):
    def __init__(self) -> None:
        super().__init__()
        self(torch.ones(1, LENGTH, WIDTH)).sum().backward()
        self.optimizer.step()


def refused(strategy: Any) -> None:
    message = r"Adam was made before .* has states already.*layers\.0\.up\.weight\); make Adam in configure_optimizers"
    with pytest.raises(ValueError, match=message):
        trained(Stepped, strategy, 4, 24)


@pytest.mark.parametrize("layout", ["zero 3", "tensor parallel"])
def test_an_optimizer_that_stepped_before_the_module_is_divided_is_refused(layout: str) -> None:
    run_on_ranks(2, refused, LAYOUTS[layout][2])


class Node:
    def __init__(self, before: Any, value: Any) -> None:
        self.before, self.value = (before,), value


class Keeps(nn.Module):
    """Keeps its parameter at the end of a chain, beside much data, which a part has as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.part = nn.Parameter(torch.ones(1)), nn.Identity()
        self.chain = reduce(Node, range(2000), self.weight)
        self.rows = self.part.rows = [[*range(1000)] for _ in range(10)]

    def exchange(self) -> None:
        self.weight = nn.Parameter(torch.zeros(1))

    def kept(self) -> Any:
        value: Any = self.chain
        while isinstance(value, Node):
            (value,) = value.before
        return value


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(beside, "warn", lines.append)
    return lines


def test_they_are_found_at_any_depth(told: list[str]) -> None:
    module = Keeps()
    places = beside.Beside(module)
    module.exchange()
    places.follow()
    assert module.kept() is module.weight
    assert not told


def test_an_attribute_with_too_much_within_is_data_and_told_once(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (beside, within):
        monkeypatch.setattr(place, "MOST_WITHIN", 8000)  # the chain has 6000
    module = Keeps()
    places = beside.Beside(module)
    assert places.attributes == {"chain"}
    for _ in range(2):
        module.exchange()
        places.follow()
    (line,) = told
    assert line.startswith("part.rows, rows of the module: there are more than 8,000 objects within, so it counts")


def test_what_several_parts_have_is_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, members = list[int](), within._members
    monkeypatch.setattr(within, "_members", lambda value: looked.append(id(value)) or members(value))
    module = Keeps()
    beside.Beside(module)
    assert looked.count(id(module.rows)) == 1


def test_a_view_of_the_whole_in_which_nobody_takes_any_looks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Keeps()
    places = beside.Beside(module)
    monkeypatch.setattr(places, "look", pytest.fail)
    module.exchange()
    with places.shown():
        assert module.kept() is module.weight


def test_what_functions_take_where_nothing_is_given_follows() -> None:
    module = Keeps()
    del module.chain

    def read(weight: Tensor = module.weight, *, twice: Any = (module.weight, 2)) -> tuple[Tensor, Any]:
        return weight, twice

    def hook(part: nn.Module, given: Any, weight: Any = module.weight) -> None:
        given[0].append(weight)

    module.read, read.kept = read, module.weight
    module.part.register_forward_pre_hook(hook)
    places = beside.Beside(module)
    module.exchange()
    places.follow()
    weight, (same, number) = module.read()
    assert (weight is same is read.kept is module.weight, number) == (True, 2)
    assert module.part([])[0] is module.weight


ELSEWHERE: list[Any] = []


@pytest.mark.parametrize("holds", [True, False])
def test_who_holds_a_replaced_one_where_nobody_looks_is_told_of(told: list[str], holds: bool) -> None:
    module = Keeps()
    places = beside.Beside(module)
    if holds:
        ELSEWHERE.append(module.weight)
    module.exchange()
    places.follow()
    places.tell_of_others()
    ELSEWHERE.clear()
    assert [line.partition(":")[0] for line in told] == ["weight"] * holds
