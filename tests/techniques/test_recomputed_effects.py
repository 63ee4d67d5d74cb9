"""What a block writes to its modules and inputs is written once, though recomputed, and read as the forward did."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.utils.data import DataLoader

from lightning_parallel import ActivationCheckpoint, Compile, DataParallel, HybridStrategy, TensorParallel, Zero
from lightning_parallel.techniques.activation_checkpoint.effects import Effects
from tests.models import Optimized, adamw
from tests.ranks import begun_on_one, run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, made, require_like
from tests.tiers import covering, sampled
from tests.trainers import trainer


class Block(nn.Module):
    """Normalises by statistics of the batch and by an average that it keeps, counts its calls, and keeps a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("average", torch.ones(6))
        self.calls, self.seen, self.count = 0, list[int](), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.count += 1
        self.average.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        self.loss = x.square().mean()
        hidden = self.up(self.norm(x) / self.average).relu() * min(1.0, self.calls / 4)
        return x + self.down(hidden) + 0.01 * len(self.seen) + 0.01 * self.count


class Model(Optimized):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.make_optimizer = nn.ModuleList(block() for _ in range(3)), adamw

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + 0.1 * sum(layer.loss for layer in self.layers)


class Plain(nn.Module):
    calls, count, seen, loss = 0, 0, (), torch.zeros(())

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class WritesWeights(Plain):
    """Shrinks weights as it computes with them, and keeps an average in a parameter that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.average.data.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
        with torch.no_grad():
            self.up.bias.mul_(0.8)
            self.down.weight.clamp_(-0.3, 0.3)
        return super().forward(x / self.average)


class WritesInputs(Plain):
    """Writes into what it is given, a tensor that the step has made."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.down.bias
        return super().forward(x)


class Gives(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch * 2.0, batch_idx)


class Thaws(Plain):
    """Has a norm that is frozen in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.norm.train(self.steps > 3)
        return super().forward(self.norm(x))


class Late(Plain):
    """Writes to its bias, or to what it is given, once it has seen some batches."""

    of_inputs = False

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        if self.count > 2:
            with torch.no_grad():
                (x if self.of_inputs else self.up.bias).mul_(0.9)
        return super().forward(x)


class LateInputs(Late):
    of_inputs = True


class Lends(Model):
    """Computes a block with another weight for a while."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        up = self.layers[1].up
        own, up.weight = up.weight, nn.Parameter(torch.full((12, 6), 0.1, dtype=batch.dtype))
        found = self.layers[1](batch)
        up.weight = own
        return super().training_step(batch, batch_idx) + found.square().mean()


class Freezes(Model):
    """Lets a block learn for the time of its forward alone, and freezes a part of another one."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.layers[1].requires_grad_(True)
        self.layers[2].up.requires_grad_(batch_idx != 1)
        loss = super().training_step(batch, batch_idx)
        self.layers[1].requires_grad_(False)
        self.layers[2].up.requires_grad_(True)
        return loss


KINDS: dict[str, tuple[type[Model], type[nn.Module]]] = {
    "modules": (Model, Block),
    "parameters": (Model, WritesWeights),
    "inputs": (Gives, WritesInputs),
    "lent": (Lends, Plain),
    "a norm that thaws": (Model, Thaws),
    "frozen afterwards": (Freezes, Plain),
}


def trained(strategy: MakeStrategy | None, kind: str) -> Any:
    model, block = KINDS[kind]
    module, data = model(block), torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer(made(strategy), max_epochs=2, precision="64-true").fit(module, DataLoader(data, 8))
    counts = [[layer.calls, len(layer.seen), int(layer.count)] for layer in module.layers]
    return counts, {name: value.detach().clone() for name, value in module.state_dict().items()}


FULL, SELECTIVE = ActivationCheckpoint(), ActivationCheckpoint("selective")
LAYOUTS: dict[str, tuple[int, list[Any]]] = {
    "full": (1, [DataParallel(1), FULL]),
    "selective": (1, [DataParallel(1), SELECTIVE]),
    "beside compiled parts": (1, [DataParallel(1), FULL, Compile(backend="aot_eager")]),
    "zero 3": (1, [Zero(1, stage=3), FULL]),
    "tensor parallel": (2, [TensorParallel(2), FULL]),
    "tensor parallel, selective": (2, [TensorParallel(2), SELECTIVE]),
}


@covering(keep=2, layout=LAYOUTS, kind=KINDS)
def test_blocks_that_write_train_as_without_recomputation(layout: str, kind: str) -> None:
    ranks, techniques = LAYOUTS[layout]
    expected = begun_on_one(trained, None, kind)
    for found in run_on_ranks(ranks, trained, partial(HybridStrategy, *techniques), kind):
        require_like(expected.result(), found)


@sampled(1, "layout", LAYOUTS)
def test_so_do_blocks_that_are_frozen_between_forward_and_backward(layout: str) -> None:
    ranks, techniques = LAYOUTS[layout]
    expected = begun_on_one(trained, None, "frozen afterwards")
    for found in run_on_ranks(ranks, trained, partial(HybridStrategy, *techniques), "frozen afterwards"):
        require_like(expected.result(), found)


class Counts(Plain):
    """Counts what it is given, as routers of experts do, and norms, and computes with none of that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("positive", torch.zeros(6, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.positive.add_((x.detach() > 0).sum(0))
        return super().forward(self.norm(x))


def in_one_graph(block: type[nn.Module], ranks: int) -> Any:
    KINDS["one"] = Model, block
    torch._dynamo.reset()  # what broke once is not read again
    techniques = [TensorParallel(ranks)] if ranks > 1 else [DataParallel(1)]
    try:
        strategy = partial(HybridStrategy, *techniques, FULL, Compile("aot_eager", fullgraph=True))
        return trained(strategy, "one")[1]
    except Unsupported as error:
        return str(error)


@sampled(1, "ranks", [1, 2])
def test_counts_stay_in_the_graph_of_a_block_and_statistics_that_it_reads_do_not(ranks: int) -> None:
    expected = begun_on_one(in_one_graph_plainly, Counts)
    for found in run_on_ranks(ranks, in_one_graph, Counts, ranks):
        require_like(expected.result(), found)
    for found in run_on_ranks(ranks, in_one_graph, WritesWeights, ranks):
        assert "computes with what it writes, from `self.average.data.mul_(0.9).add_(x.detach()" in found


def refused(block: type[nn.Module]) -> str:
    KINDS["one"] = Gives, block
    try:
        trained(partial(HybridStrategy, DataParallel(1), FULL), "one")
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("block", "what"), [(Late, "up.bias"), (LateInputs, "what it is given")])
def test_what_is_written_later_than_in_the_first_forward_is_refused(block: type[nn.Module], what: str) -> None:
    (found,) = run_on_ranks(1, refused, block)
    assert f"{block.__name__} writes to {what} in its forward, which it did not the first time" in found


def in_one_graph_plainly(block: type[nn.Module]) -> Any:
    KINDS["one"] = Model, block
    return trained(None, "one")[1]


def test_only_tensors_of_modules_that_write_are_copied() -> None:
    block = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    block.register_buffer("table", torch.ones(4))
    effects = Effects(block)
    for copies in (True, False):
        found = effects.before(())
        block(torch.randn(3, 4))
        effects.after(found)
        kept = {key: value for (_, key, _), value in found.modules}
        assert (kept["table"] is not block.table) is copies
        assert kept["running_mean"] is not block[0].running_mean


def test_what_a_recomputation_adds_is_gone_afterwards() -> None:
    block = nn.Linear(2, 2)
    effects = Effects(block)
    found = effects.before(())
    block.own = 1
    with effects.again(found):
        block.own, block.new, block.part = 2, torch.ones(()), (part := nn.Identity())
    assert (block.own, hasattr(block, "new"), block.part) == (1, False, part)
