"""Steps under tensor parallelism that draw random numbers, decide by them, or run a model several times."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from lightning_parallel import DataParallelStrategy, TensorParallelStrategy
from lightning_parallel.techniques.divided.randomness import drawn_apart
from tests.models import Optimized, adamw
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made, require_like
from tests.tiers import covering, sampled
from tests.trainers import trainer

TP2 = partial(TensorParallelStrategy, 2)


def drawn_after(seed: int) -> list[float]:
    torch.manual_seed(seed)
    with drawn_apart(torch.device("cpu"), [8, 1, 0, 4]):  # of 8 the first four
        return torch.rand(3).tolist()


def test_draws_for_own_elements_differ_where_the_generator_does() -> None:
    """As that of a GPU does between ranks that read different samples."""
    assert drawn_after(1) == drawn_after(1) != drawn_after(2)


class Block(nn.Module):
    """Leaves itself out at random, and draws within its region."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        if self.skips and torch.rand(()) < 0.5:
            return x
        hidden = F.gelu(self.up(self.norm(x)))
        if self.skips:  # changes nothing, but draws for a rank's own features
            hidden = hidden + 0 * F.dropout(hidden, 0.5, training=True)
        return x + self.down(hidden) * (1 + (torch.rand(()).item() if self.skips else 0))


class Repeated(Optimized):
    """Runs its blocks once for each of some lengths, of which ranks divide some only."""

    def __init__(self, lengths: tuple[int, ...], skips: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.make_optimizer, self.lengths = adamw, lengths
        self.stem, self.head = nn.Linear(5, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block(skips) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = []
        for length in self.lengths:
            x = self.stem(batch[:, :length])
            for block in self.blocks:
                x = block(x)
            found.append(self.head(x).square().mean())
        return torch.stack(found).sum()


def fitted(strategy: MakeStrategy | None, *of: Any) -> Any:
    module, losses = Repeated(*of), list[float]()
    module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
    data = torch.randn(24, 8, 5, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    trainer(made(strategy), max_epochs=1).fit(module, DataLoader(data, 4))  # type: ignore[arg-type]
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


@sampled(1, "lengths", [(8, 7), (7, 8), (4, 8, 7, 8)])
def test_a_step_that_runs_blocks_on_several_lengths(lengths: tuple[int, ...]) -> None:
    assert_like_one_device(fitted, 2, (None, lengths, False), (TP2, lengths, False))


def test_ranks_leave_the_same_layers_out() -> None:
    """They decide by numbers that all draw alike, whatever each draws for its own features."""
    first, second = run_on_ranks(2, fitted, TP2, (8,), True)
    require_like(first, second)


class OtherMemory(nn.Module):
    """Gives what it learns, and a buffer, other memory while it runs, which torch does not count as a change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.gain = nn.Parameter(torch.ones(32))
        self.register_buffer("shift", torch.full((32,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        self.gain.data = self.gain.detach() * 0.98
        hidden = self.up(self.norm(x)) * self.gain
        for number in range(3):
            self.shift.data = self.shift * (1 - 0.1 * number)  # the first is as it was
            hidden = hidden + self.shift
        return x + self.down(hidden.tanh())


class RunsOtherMemory(Repeated):
    def __init__(self) -> None:
        super().__init__((8,), False)
        self.blocks = nn.ModuleList(OtherMemory() for _ in range(3))


def fitted_to_other_memory(strategy: MakeStrategy | None) -> Any:
    module, data = RunsOtherMemory(), torch.randn(24, 8, 5, generator=torch.Generator().manual_seed(1))
    trainer(made(strategy), max_epochs=1).fit(module, DataLoader(data, 4))  # type: ignore[arg-type]
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensors_that_are_given_other_memory(sequence_parallel: bool) -> None:
    assert_like_one_device(fitted_to_other_memory, 2, (None,), (partial(TP2, sequence_parallel=sequence_parallel),))


class Scales(torch.autograd.Function):
    """Multiplies in place, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """See `torch.autograd.Function`."""
        ctx.mark_dirty(x)
        ctx.factor = factor
        return x.mul_(factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """See `torch.autograd.Function`."""
        return gradient * ctx.factor / 2, None


class InPlace(nn.Module):
    """Lets a function change its features, or what it returns, and goes on with what it gave or with what it got."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x)).tanh() * 1
        if self.kind == "features":
            Scales.apply(hidden, 0.7)
        elif self.kind == "both":
            hidden = hidden + Scales.apply(hidden, 0.7)
        hidden = self.down(hidden)
        if self.kind == "results":
            Scales.apply(hidden, 0.7)
        return x + hidden


class RunsInPlace(Repeated):
    def __init__(self, kind: str) -> None:
        super().__init__((8,), False)
        self.blocks = nn.ModuleList(InPlace(kind) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def fitted_in_place(kind: str, strategy: MakeStrategy | None, batch: int = 4) -> Any:
    module, data = RunsInPlace(kind), torch.randn(24, 8, 5, generator=torch.Generator().manual_seed(1))
    trainer(made(strategy), max_epochs=1).fit(module, DataLoader(data, batch))  # type: ignore[arg-type]
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@covering(keep=1, kind=["features", "both", "results"], sequence_parallel=[True, False])
def test_functions_that_change_what_they_get(kind: str, sequence_parallel: bool) -> None:
    assert_like_one_device(fitted_in_place, 2, (kind, None), (kind, partial(TP2, sequence_parallel=sequence_parallel)))


def test_functions_that_change_views_beside_logged_values() -> None:
    """Torch waits for ever for who asks whether a view is a leaf while it notes that one was changed."""
    assert_like_one_device(fitted_in_place, 2, ("results", None), ("results", DataParallelStrategy, 2))


class Retains(nn.Module):
    """Keeps its features, and their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.up(self.norm(x)).tanh()
        self.hidden.retain_grad()
        return x + self.down(self.hidden)


class RunsRetaining(Repeated):
    """Looks at gradients of features when backward is over."""

    def __init__(self) -> None:
        super().__init__((8,), False)
        self.blocks = nn.ModuleList(Retains() for _ in range(3))
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        self.norms += [float(block.hidden.grad.norm()) for block in self.blocks]


def fitted_retaining(strategy: MakeStrategy | None) -> Any:
    module, data = RunsRetaining(), torch.randn(12, 8, 5, generator=torch.Generator().manual_seed(1))
    trainer(made(strategy), max_epochs=1).fit(module, DataLoader(data, 4))  # type: ignore[arg-type]
    return module.norms, {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_retained_gradients_are_full_after_backward() -> None:
    assert_like_one_device(fitted_retaining, 2, (None,), (TP2,))


class Computed(nn.Module):
    """A bias that is made of a parameter."""

    def forward(self, bias: Tensor) -> Tensor:
        return bias.tanh() * 2


class Outputs:
    """A hook that keeps what a module returns, in an attribute that it had before."""

    def __init__(self, module: nn.Module) -> None:
        module.seen = None  # type: ignore[assignment]
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, given: Any, output: Tensor) -> None:
        module.seen = output  # type: ignore[assignment]


class OfOthers(Repeated):
    """Maps of torch's own to which others gave what torch does not."""

    def __init__(self) -> None:
        super().__init__((8,), False)
        self.kept: list[Any] = []
        for block in self.blocks:
            parametrize.register_parametrization(block.up, "bias", Computed())
            bias = block.down.bias.detach().clone()
            del block.down.bias
            block.down.register_buffer("bias", bias)
            Outputs(block.norm), Outputs(block.down)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.blocks[0].norm.seen.square().mean()

    def on_train_batch_end(self, outputs: Any, *of: Any) -> None:
        for seen in (getattr(block, name).seen for block in self.blocks for name in ("norm", "down")):
            self.kept.append(type(seen) is Tensor and float(seen.detach().square().sum()))


def fitted_of_others(strategy: MakeStrategy | None) -> Any:
    module = OfOthers()
    data = torch.randn(12, 8, 5, generator=torch.Generator().manual_seed(1))
    trainer(made(strategy), max_epochs=1).fit(module, DataLoader(data, 4))  # type: ignore[arg-type]
    return module.kept, {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_maps_whose_bias_is_no_parameter() -> None:
    assert_like_one_device(fitted_of_others, 2, (None,), (TP2,))


class Freezes(Repeated):
    """Has its first block learn from every other batch only, none of which is the last one before a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.blocks[0].requires_grad_(batch_idx % 2 == 0)
        return super().training_step(batch, batch_idx)


def fitted_frozen(strategy: MakeStrategy | None) -> dict[str, Tensor]:
    module, data = Freezes((8,), False), torch.randn(24, 8, 5, generator=torch.Generator().manual_seed(1))
    run = trainer(made(strategy), max_epochs=1, accumulate_grad_batches=2)
    run.fit(module, DataLoader(data, 4))  # type: ignore[arg-type]
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_frozen_parameters_keep_accumulated_gradients() -> None:
    assert_like_one_device(fitted_frozen, 2, (None,), (TP2,))
