"""Steps that read and write weights themselves, outside of the blocks they belong to or within: penalties, clipping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    DataParallelStrategy,
    HybridStrategy,
    TensorParallel,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.techniques.zero.sharded import parameters
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import made, require_like
from tests.tiers import covering, sampled
from tests.trainers import trainer

SAMPLES, WIDTH = 24, 10


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 18), nn.Linear(18, WIDTH)
        self.act: Callable[[Layer], Any] = lambda layer: None

    def forward(self, x: Tensor) -> Tensor:
        self.act(self)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(LightningModule):
    """Each step does something to its weights, or with them."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.found: list[float] = []
        self.kept: list[Tensor] = []
        torch.manual_seed(0)
        self.stem, self.layers = nn.Linear(4, WIDTH), nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.act: Callable[[Any], Any] = act if act in OUTSIDE else lambda module: None
        self.after: Callable[[Any], Any] = act if act in AFTER else lambda module: None
        for layer in self.layers if act in WITHIN else ():
            layer.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        more = self.act(self)
        loss = (self(batch[0]) - 1).square().mean()
        return loss if more is None else loss + more

    def on_after_backward(self) -> None:
        if self.automatic_optimization:
            self.after(self)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class ByHand(Model):
    """Optimizes by itself, twice in each step."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__(act)
        self.automatic_optimization = False
        self.given = act is gradients_given

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            if self.given:
                parameters = list(self.parameters())
                for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    parameter.grad = gradient
            else:
                self.manual_backward(loss)
            self.after(self)
            optimizer.step()


# ---------------------------------------------------------------- what steps do


def penalty(module: Any) -> Tensor:
    return 0.01 * sum(parameter.square().sum() for parameter in module.parameters())


def distance_of_layers(module: Any) -> Tensor:
    one, other = module.layers[0], module.layers[-1]
    return 0.1 * (one.up.weight @ other.down.weight).abs().mean()


def borrowed(module: Any) -> Tensor:
    taken = F.linear(torch.ones(1, WIDTH), module.layers[1].up.weight, module.layers[2].up.bias)
    return 0.1 * taken.square().mean()


def clipped(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


@torch.no_grad()
def shrunk(module: Any) -> None:
    for parameter in module.parameters():
        parameter.copy_(0.97 * parameter)


def loaded(module: Any) -> None:
    module.load_state_dict({name: 0.97 * value for name, value in module.state_dict().items()})


@torch.no_grad()
def counted_and_clipped(module: Any) -> None:
    if module.global_rank == 0:
        assert sum(parameter.numel() for parameter in module.parameters()) == module.count
    clipped(module)


def masked(module: Any) -> Tensor:
    weight = module.layers[0].up.weight
    mask, factors = torch.ones_like(weight), weight.new_zeros(WIDTH)
    mask[:4], factors[1:] = 0, 0.5
    return 0.1 * (weight * mask * factors).square().sum()


def differentiated_twice(module: Any) -> Tensor:
    """Penalises the gradient by the input."""
    inputs = torch.ones(1, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(module(inputs).square().sum(), inputs, create_graph=True)
    return 0.1 * gradient.square().sum()


def lent(module: Any) -> Tensor:
    """Computes with another parameter in the place of one, and puts that back."""
    layer, own = module.layers[1].up, module.layers[1].up.weight
    layer.weight = nn.Parameter(torch.full((18, WIDTH), 0.1))
    found = module(torch.ones(1, 4))
    layer.weight = own
    return 0.1 * found.square().mean()


def called(module: Any) -> Tensor:
    """Computes a layer with halves of its parameters, which learn by it."""
    halves = {name: value / 2 for name, value in module.layers[2].named_parameters()}
    found: Tensor = torch.func.functional_call(module.layers[2], halves, (torch.ones(1, WIDTH),))
    return 0.1 * found.square().mean()


def in_numpy(module: Any) -> None:
    """Arrays that share memory with parameters, and stay."""
    module.arrays = [parameter.detach().numpy() for parameter in module.parameters()]
    module.found.append(sum(float(abs(array).sum()) for array in module.arrays))


@torch.no_grad()
def clipped_in_place(layer: Layer) -> None:
    layer.up.weight.clamp_(-0.2, 0.2)


def normalised(layer: Layer) -> None:
    layer.up.weight.data = torch.renorm(layer.up.weight.data, p=2, dim=0, maxnorm=0.5)


def gradients_clipped(module: Any) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def gradients_changed(module: Any) -> None:
    for number, parameter in enumerate(module.parameters()):
        if parameter.grad is not None and number % 3:
            parameter.grad.mul_(0.5)
    module.head.bias.grad = None
    module.stem.bias.grad = 2 * module.stem.bias.grad


def gradients_read(module: Any) -> None:
    module.found.append(sum(float(parameter.grad.square().sum()) for parameter in module.parameters()))


def gradients_kept(module: Any) -> None:
    """Those of the step before are compared with those of this one; every other one is kept by a view of it."""
    gradients = [parameter.grad for parameter in module.parameters()]
    pairs = zip(module.kept, gradients, strict=False)
    module.found.append(sum(float((old.view(-1) * new.view(-1)).sum()) for old, new in pairs))
    module.kept = [gradient.view(-1) if number % 2 else gradient for number, gradient in enumerate(gradients)]


def gradients_given(module: Any) -> None:
    """They come from `torch.autograd.grad`, and no backward runs."""


OUTSIDE = (
    *(penalty, distance_of_layers, borrowed, clipped, shrunk, loaded, counted_and_clipped),
    *(masked, differentiated_twice, lent, called, in_numpy),
)
WITHIN = clipped_in_place, normalised
AFTER = gradients_clipped, gradients_changed, gradients_read, gradients_kept, gradients_given
ACTS = {act.__name__: act for act in (*OUTSIDE, *WITHIN, *AFTER)}


def trained(act: str, by_hand: bool, unit_bytes: int, strategy: Any, batch_size: int) -> Any:
    parameters.UNIT_BYTES, before = unit_bytes, parameters.UNIT_BYTES
    try:
        module = Shares() if act == "shared" else (ByHand if by_hand else Model)(ACTS[act])
        module.count = sum(parameter.numel() for parameter in module.parameters())
        samples = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        trainer(made(strategy), max_epochs=2).fit(module, DataLoader(TensorDataset(samples), batch_size))
    finally:
        parameters.UNIT_BYTES = before
    return module.found, {name: value.clone() for name, value in module.state_dict().items()}


WHOLE, UNITS = 2**24, 64
LAYOUTS: dict[str, Any] = {
    "data parallel": (2, 2, WHOLE, DataParallelStrategy),
    "zero 1": (2, 2, WHOLE, partial(ZeroStrategy, stage=1)),
    "zero 2": (2, 2, WHOLE, partial(ZeroStrategy, stage=2)),
    "zero 3": (2, 2, WHOLE, partial(ZeroStrategy, stage=3)),
    "zero 3 in units": (2, 2, UNITS, partial(ZeroStrategy, stage=3)),
    "zero 3 in units, on 3": (3, 3, UNITS, partial(ZeroStrategy, stage=3)),
    "replicated zero 3 in units": (4, 4, UNITS, lambda: HybridStrategy(Zero(2, replicate=2))),
    "tensor parallel": (2, 1, WHOLE, partial(TensorParallelStrategy, 2)),
    "zero 3 in units beside tensor parallel": (4, 2, UNITS, lambda: HybridStrategy(Zero(2), TensorParallel(2))),
}


@covering(keep=1, layout=LAYOUTS, act=ACTS, by_hand=(False, True))
def test_steps_read_and_write_weights_as_on_one_device(layout: str, act: str, by_hand: bool) -> None:
    ranks, data_ranks, unit_bytes, strategy = LAYOUTS[layout]
    expected = begun_on_one(trained, act, by_hand, unit_bytes, None, 12 if data_ranks == 3 else 8)
    size = 4 if data_ranks == 3 else 8 // data_ranks
    for found in run_on_ranks(ranks, trained, act, by_hand, unit_bytes, strategy, size):
        require_like(expected.result(), found)


class Accumulates(Model):
    """Looks at gradients before it steps by them, and keeps them."""

    def __init__(self) -> None:
        super().__init__(penalty)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients_kept(self)


def accumulated(strategy: Any, batch_size: int) -> Any:
    module, samples = Accumulates(), torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    run = trainer(made(strategy), max_epochs=2, accumulate_grad_batches=3)
    run.fit(module, DataLoader(TensorDataset(samples), batch_size))
    return module.found, module.state_dict()


@sampled(1, "layout", ["data parallel", "zero 1", "zero 2"])
def test_gradients_kept_from_step_to_step_while_they_accumulate(layout: str) -> None:
    ranks, _, _, strategy = LAYOUTS[layout]
    expected = begun_on_one(accumulated, None, 4)
    for found in run_on_ranks(ranks, accumulated, strategy, 2):
        require_like(expected.result(), found)


class Shares(Model):
    """Blocks have parameters in common: one module, one weight, one that is used outside of blocks, too."""

    def __init__(self) -> None:
        super().__init__(borrowed)
        self.layers[3].up, self.layers[2].down.weight = self.layers[0].up, self.layers[1].down.weight


@sampled(1, "layout", ["zero 3 in units", "zero 3 in units beside tensor parallel"])
def test_parameters_that_blocks_share(layout: str) -> None:
    ranks, data_ranks, unit_bytes, strategy = LAYOUTS[layout]
    expected = begun_on_one(trained, "shared", False, unit_bytes, None, 8)
    for found in run_on_ranks(ranks, trained, "shared", False, unit_bytes, strategy, 8 // data_ranks):
        require_like(expected.result(), found)


class Replaces(Model):
    """Leaves something else in the place of a parameter when a step ends."""

    def __init__(self) -> None:
        super().__init__(penalty)
        self.before = set[float]()

    def norms(self) -> set[float]:
        return {round(float(parameter.detach().norm()), 4) for parameter in self.parameters()}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.before = self.norms()
            self.replace()
        return super().training_step(batch, batch_idx)

    def replace(self) -> None:
        self.layers[0].up.weight = nn.Parameter(torch.ones(18, WIDTH))


class Prunes(Replaces):
    def replace(self) -> None:
        nn.utils.prune.l1_unstructured(self.layers[0].up, "weight", 0.3)


class Swaps(Replaces):
    def replace(self) -> None:
        one, other = self.layers[0].up, self.layers[1].up
        one.weight, other.weight = other.weight, one.weight


class Within(Replaces):
    """While its block computes."""

    def replace(self) -> None:
        self.layers[0].act = lambda layer: setattr(layer.up, "weight", nn.Parameter(torch.ones(18, WIDTH)))


class Drops(Replaces):
    def replace(self) -> None:
        self.layers[0].up.bias = None


KINDS = [Replaces, Prunes, Swaps, Within, Drops]


def refused(strategy: Any, unit_bytes: int) -> list[str]:
    parameters.UNIT_BYTES, before = unit_bytes, parameters.UNIT_BYTES
    said = []
    try:
        for kind in KINDS:
            module = kind()
            with pytest.raises(ValueError, match=r".") as error:
                trainer(strategy(), max_epochs=1).fit(module, DataLoader(TensorDataset(torch.randn(12, 4)), 4))
            said.append(str(error.value))
            assert module.before <= module.norms()  # pruning has added one
    finally:
        parameters.UNIT_BYTES = before
    return said


@sampled(1, "layout", ["tensor parallel", "zero 3", "zero 3 in units"])
def test_a_parameter_that_a_step_replaces_is_named(layout: str) -> None:
    ranks, _, unit_bytes, strategy = LAYOUTS[layout]
    for found in run_on_ranks(ranks, refused, strategy, unit_bytes):
        for said in found:
            assert "was replaced, or taken out of its module, in a step" in said
            assert said.startswith(("the parameter layers.0.up.", "the parameter weight"))
