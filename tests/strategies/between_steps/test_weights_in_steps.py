"""Steps that read and write weights themselves, outside of the blocks they belong to or within: penalties, clipping."""

from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel.techniques.zero.sharded import parameters
from tests.ranks import run_on_ranks
from tests.strategies.between_steps.chains import (
    INNER,
    LAYOUTS,
    LENGTH,
    WIDTH,
    Chain,
    Kind,
    Layer,
    check,
)
from tests.tiers import sampled
from tests.trainers import trainer


class Acts(Chain):
    """Each step does something to its weights, or with them, by a method; by hand it optimizes twice in each step."""

    class Acting(Layer):
        def act(self) -> None: ...

        def forward(self, x: Tensor) -> Tensor:
            self.act()
            return super().forward(x)

        def replace(self) -> None:
            self.up.weight = nn.Parameter(torch.ones(INNER, WIDTH))

        @torch.no_grad()
        def clip(self) -> None:
            self.up.weight.clamp_(-0.2, 0.2)

        def normalise(self) -> None:
            self.up.weight.data = torch.renorm(self.up.weight.data, p=2, dim=0, maxnorm=0.5)

    layer = Acting

    def __init__(self, act: str, by_hand: bool = False) -> None:
        super().__init__()
        self.act, self.kept, self.automatic_optimization = act, list[Tensor](), not by_hand
        self.count = sum(parameter.numel() for parameter in self.parameters())
        for layer in self.layers if act in WITHIN else ():
            layer.act = getattr(layer, act)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()
            if self.act == "give_gradients":  # no backward runs
                parameters = list(self.parameters())
                for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    parameter.grad = gradient
            else:
                self.manual_backward(loss)
            if self.act in AFTER:
                getattr(self, self.act)()
            optimizer.step()
        return None

    def loss(self, batch: list[Tensor]) -> Tensor:
        more = getattr(self, self.act)() if self.act in (*READS, *WRITES) else None
        loss = (self(batch[0]) - 1).square().mean()
        return loss if more is None else loss + more

    def on_after_backward(self) -> None:
        if self.automatic_optimization and self.act in AFTER:
            getattr(self, self.act)()

    def on_train_batch_end(self, *_: Any) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    # ---------------------------------------------------------------- what steps do

    def penalise(self) -> Tensor:
        return 0.01 * sum(parameter.square().sum() for parameter in self.parameters())

    def borrow(self) -> Tensor:
        return 0.1 * F.linear(one(), self.layers[1].up.weight, self.layers[2].up.bias).square().mean()

    def mask(self) -> Tensor:
        weight = self.layers[0].up.weight
        mask, factors = torch.ones_like(weight), weight.new_zeros(WIDTH)
        mask[:4], factors[1:] = 0, 0.5
        return 0.1 * (weight * mask * factors).square().sum()

    def differentiate_twice(self) -> Tensor:
        inputs = one().requires_grad_()
        (gradient,) = torch.autograd.grad(self(inputs).square().sum(), inputs, create_graph=True)
        return 0.1 * gradient.square().sum()

    def lend(self) -> Tensor:
        """Computes with another parameter in the place of one, and puts that back."""
        layer, own = self.layers[1].up, self.layers[1].up.weight
        layer.weight = nn.Parameter(torch.full((INNER, WIDTH), 0.1, dtype=torch.float64))
        found = self(one())
        layer.weight = own
        return 0.1 * found.square().mean()

    def call(self) -> Tensor:
        """Computes a layer with halves of its parameters, which learn by it."""
        halves = {name: value / 2 for name, value in self.layers[2].named_parameters()}
        return 0.1 * torch.func.functional_call(self.layers[2], halves, (one(),)).square().mean()

    def read_in_numpy(self) -> None:
        """Arrays that share memory with parameters, and stay."""
        self.arrays = [parameter.detach().numpy() for parameter in self.parameters()]
        self.seen.append(sum(float(abs(array).sum()) for array in self.arrays))

    def clip_all(self) -> None:
        if self.global_rank == 0:
            assert sum(parameter.numel() for parameter in self.parameters()) == self.count
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    def load(self) -> None:
        self.load_state_dict({name: 0.97 * value for name, value in self.state_dict().items()})

    def give_gradients(self) -> None: ...

    def change_gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        for number, parameter in enumerate(self.parameters()):
            if parameter.grad is not None and number % 3:
                parameter.grad.mul_(0.5)
        self.head.bias.grad = None
        self.stem.bias.grad = 2 * self.stem.bias.grad

    def keep_gradients(self, *_: Any) -> None:
        """Those of the step before are compared with those of this one; every other one is kept by a view of it."""
        gradients = [parameter.grad for parameter in self.parameters()]
        pairs = zip(self.kept, gradients, strict=False)
        self.seen.append(sum(float(each.square().sum()) for each in gradients))
        self.seen.append(sum(float((old.view(-1) * new.view(-1)).sum()) for old, new in pairs))
        self.kept = [gradient.view(-1) if number % 2 else gradient for number, gradient in enumerate(gradients)]

    # ---------------------------------------------------------------- what is refused

    def replace(self) -> None:
        self.layers[0].up.weight = nn.Parameter(torch.ones(INNER, WIDTH))

    def prune(self) -> None:
        nn.utils.prune.l1_unstructured(self.layers[0].up, "weight", 0.3)

    def swap(self) -> None:
        first, second = self.layers[0].up, self.layers[1].up
        first.weight, second.weight = second.weight, first.weight

    def replace_within(self) -> None:
        self.layers[0].act = self.layers[0].replace

    def drop(self) -> None:
        self.layers[0].up.bias = None


def one() -> Tensor:
    return torch.ones(1, LENGTH, WIDTH, dtype=torch.float64)


class Accumulates(Acts):
    """Looks at gradients before it steps by them, and keeps them."""

    options = {"accumulate_grad_batches": 2}
    on_before_optimizer_step = Acts.keep_gradients


class Shares(Acts):
    """Blocks have parameters in common: one module, one weight, one that is used outside of blocks, too."""

    def __init__(self, act: str) -> None:
        super().__init__(act)
        self.layers[3].up, self.layers[2].down.weight = self.layers[0].up, self.layers[1].down.weight


READS = ["penalise", "borrow", "mask", "differentiate_twice", "lend", "call", "read_in_numpy"]
WRITES, WITHIN = ["clip_all", "load"], ["clip", "normalise"]
AFTER = ["change_gradients", "keep_gradients", "give_gradients"]
GROUPS: dict[str, list[Kind]] = {
    "reads": [partial(Acts, act) for act in READS],
    "writes": [partial(Acts, act) for act in (*WRITES, *WITHIN)],
    "gradients": [*(partial(Acts, act) for act in AFTER[:2]), partial(Accumulates, "penalise")],
    "by hand": [partial(Acts, act, True) for act in (*AFTER, *WITHIN, "penalise", "differentiate_twice", "clip_all")],
}
CELLS = [
    *[("zero 3 in units, on 3", "writes"), ("zero 3 in units, on 3", "reads"), ("zero 3", "reads")],
    *[("data parallel", "gradients"), ("zero 1", "by hand"), ("zero 2", "gradients"), ("zero 2", "by hand")],
    *[("zero 3 in units", "gradients"), ("tensor parallel", "writes"), ("replicated zero 3 in units", "gradients")],
    *[("replicated zero 3 in units", "writes"), ("tensor parallel", "reads"), ("zero 3 in units", "by hand")],
    *[("tensor x zero 3 in units", group) for group in ("by hand", "gradients", "writes", "reads")],
]


@sampled(3, ("layout", "group"), CELLS)
def test_weights_in_steps(layout: str, group: str) -> None:
    shared: list[Kind] = [partial(Shares, "borrow")] if group == "reads" and "3 in units" in layout else []
    check(shared + GROUPS[group], layout)


class Replaces(Acts):
    """Leaves something else in the place of a parameter when a step ends."""

    def norms(self) -> set[float]:
        return {round(float(parameter.detach().norm()), 4) for parameter in self.parameters()}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx == 1:
            self.before = self.norms()
            getattr(self, self.act)()
        return super().training_step(batch, batch_idx)


def refused() -> None:
    acts = "replace", "prune", "swap", "replace_within", "drop"
    for layout, act in product(("tensor parallel", "zero 3 in units"), acts):
        module, data = Replaces(act), TensorDataset(torch.randn(16, LENGTH, WIDTH))
        says = r"^a step replaced the parameter (layers\.0\.up\.|weight).* or removed it from its module"
        with mock.patch.object(parameters, "UNIT_BYTES", 64), pytest.raises(ValueError, match=says):
            trainer(LAYOUTS[layout].strategy(), max_epochs=1).fit(module, DataLoader(data, 4))
        assert module.before <= module.norms()  # pruning has added one


def test_parameters_that_a_step_replaces_are_named() -> None:
    run_on_ranks(2, refused)
