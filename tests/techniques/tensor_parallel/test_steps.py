"""Steps under tensor parallelism that draw random numbers, decide by them, or do unusual things with what they have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader

from lightning_parallel.techniques.divided.randomness import rng_for_elements
from tests.layouts import layouts
from tests.models import Optimized, adamw
from tests.ranks import run_on_ranks
from tests.strategies.one_and_two import MakeStrategy, assert_like_one_device, made, require_like
from tests.trainers import trainer


def drawn_after(seed: int) -> list[float]:
    torch.manual_seed(seed)
    with rng_for_elements(torch.device("cpu"), [8, 1, 0, 4]):  # of 8 the first four
        return torch.rand(3).tolist()


def test_draws_for_own_elements_differ_where_the_generator_does() -> None:
    """As that of a GPU does between ranks that read different samples."""
    assert drawn_after(1) == drawn_after(1) != drawn_after(2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Skips(Block):
    """Leaves itself out at random, and draws within its region."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            return x
        hidden = F.gelu(self.up(self.norm(x)))
        hidden = hidden + 0 * F.dropout(hidden, 0.5, training=True)  # draws for a rank's own features
        return x + self.down(hidden) * (1 + torch.rand(()).item())


class OtherMemory(Block):
    """Gives what it learns, and a buffer, other memory while it runs, which torch does not count as a change."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(32))
        self.register_buffer("shift", torch.full((32,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        self.gain.data = self.gain.detach() * 0.98
        hidden = self.up(self.norm(x)) * self.gain
        for number in range(3):
            self.shift.data = self.shift * (1 - 0.1 * number)  # the first is as it was
            hidden = hidden + self.shift
        return x + self.down(hidden.tanh())


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


class InPlace(Block):
    """Lets a function change its features, or what it returns, and goes on with what it gave or with what it got."""

    def __init__(self, kind: str) -> None:
        super().__init__()
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


class Retains(Block):
    """Keeps its features, and their gradient."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.up(self.norm(x)).tanh()
        self.hidden.retain_grad()
        return x + self.down(self.hidden)


class Computed(nn.Module):
    """A bias that is made of a parameter."""

    def forward(self, bias: Tensor) -> Tensor:
        return bias.tanh() * 2


class OfOthers(Block):
    """Maps to which others gave what torch does not: a bias that is computed, one that is a buffer, and hooks."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.up, "bias", Computed())
        bias = self.down.bias.detach().clone()
        del self.down.bias
        self.down.register_buffer("bias", bias)
        for module in (self.norm, self.down):
            module.seen = None  # type: ignore[assignment]
            module.register_forward_hook(keep_output)


def keep_output(module: Any, given: Any, output: Tensor) -> None:
    module.seen = output


class Repeated(Optimized):
    """Runs its blocks once for each of some lengths, of which ranks divide some only."""

    def __init__(self, *blocks: nn.Module, lengths: tuple[int, ...] = (8,)) -> None:
        super().__init__()
        self.make_optimizer, self.lengths = adamw, lengths
        self.stem, self.blocks, self.head = nn.Linear(5, 16), nn.ModuleList(blocks), nn.Linear(16, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = []
        for length in self.lengths:
            x = self.stem(batch[:, :length])
            for block in self.blocks:
                x = block(x)
            found.append(self.head(x).square().mean())
        self.log("loss", torch.stack(found).sum())
        return torch.stack(found).sum()

    def on_train_batch_end(self, outputs: Any, *of: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))


class Looking(Repeated):
    """Looks at gradients of features when backward is over, and at what hooks kept of maps when the batch is."""

    def __init__(self) -> None:
        super().__init__(OfOthers(), Retains(), Retains())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.blocks[0].norm.seen.square().mean()

    def on_after_backward(self) -> None:
        self.seen += [float(block.hidden.grad.norm()) for block in self.blocks[1:]]

    def on_train_batch_end(self, outputs: Any, *of: Any) -> None:
        kept = [getattr(self.blocks[0], name).seen for name in ("norm", "down")]
        self.seen += [type(each) is Tensor and float(each.detach().square().sum()) for each in kept]


MODELS: dict[str, tuple[Callable[[], Repeated], int]] = {
    "looked at": (Looking, 2),
    "changed in place": (lambda: Repeated(*(InPlace(kind) for kind in ("features", "both", "results"))), 1),
    "other memory": (lambda: Repeated(*(OtherMemory() for _ in range(3))), 1),
    "several lengths": (lambda: Repeated(*(Block() for _ in range(3)), lengths=(4, 8, 7, 8)), 1),
    "skipped": (lambda: Repeated(*(Skips() for _ in range(3))), 1),
}
"""How they are made, and how many batches a step of the optimizer takes."""


def fitted(model: str, strategy: MakeStrategy | None, batch: int = 4) -> Any:
    torch.manual_seed(3)
    make, accumulate = MODELS[model]
    module, data = make(), torch.randn(24, 8, 5, generator=torch.Generator().manual_seed(1))
    run = trainer(made(strategy), max_epochs=1, accumulate_grad_batches=accumulate)
    run.fit(module, DataLoader(data, batch))  # type: ignore[arg-type]
    return module.seen, {name: value.detach().clone() for name, value in module.state_dict().items()}


LAYOUTS = layouts("tensor parallel", "tensor parallel, sequence whole", "data parallel")
ROWS = [
    *((model, "tensor parallel") for model in MODELS if model != "skipped"),
    # torch waits for ever for who asks whether a view is a leaf while it notes that one was changed
    ("changed in place", "data parallel"),
    *((model, "tensor parallel, sequence whole") for model in ("changed in place", "other memory")),
]
DEFAULT = [*ROWS[:3], ROWS[4]]


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*row, marks=() if row in DEFAULT else (pytest.mark.exhaustive,)) for row in ROWS],
)
def test_unusual_blocks_train_as_on_one_device(model: str, layout: str) -> None:
    _, readers, strategy = LAYOUTS[layout]
    assert_like_one_device(fitted, 2, (model, None), (model, strategy, 4 // readers))


def test_ranks_leave_the_same_layers_out() -> None:
    """They decide by numbers that all draw alike, whatever each draws for its own features."""
    first, second = run_on_ranks(2, fitted, "skipped", LAYOUTS["tensor parallel"].strategy)
    require_like(first, second)
