"""Compiled blocks that are recomputed in backward: inside a graph, or with graphs inside a checkpoint."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.named import HybridStrategy
from lightning_parallel.techniques.activation_checkpoint import ActivationCheckpoint
from lightning_parallel.techniques.compile import Compile
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.tensor_parallel import TensorParallel
from lightning_parallel.techniques.tools.redirect import restore_forward
from tests.benchmarks.test_tensor_parallel import WIDTH, Block, divided, mesh_of_ranks
from tests.curves import compare_weights
from tests.models import points
from tests.ranks import begun_on_one, run_on_ranks
from tests.techniques.test_compile import COMPILED
from tests.techniques.test_wire import world
from tests.tiers import sampled
from tests.trainers import trainer

assert world  # a fixture

STRICT = Compile("aot_eager", fullgraph=True)
TP = TensorParallel(2)


class Scaled(nn.Module):
    """A block with a number of its own: torch compiles the first for it alone, and the next for any number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(13, 26), nn.Linear(26, 13)
        self.scale = torch.rand(()).item()
        self.dropout = nn.Dropout(0.0)  # which draws nothing

    def forward(self, x: Tensor) -> Any:
        return x + self.change(x)

    def change(self, x: Tensor) -> Tensor:
        return self.scale * self.down(self.dropout(self.up(x).relu()))


class Returns(Scaled):
    """A block that returns more than a tensor."""

    def forward(self, x: Tensor) -> Any:
        return x + self.change(x), None, {"scale": self.scale, "part": (x / 8, "x")}


class Recomputes(Scaled):
    """A block of which the user recomputes the greater part."""

    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(self.change, x, use_reentrant=False)


class Drops(Scaled):
    """A block that draws in several ways, of one tensor twice."""

    def change(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.up(x), 0.3)
        both = F.dropout(hidden, 0.5) + torch.dropout(hidden, 0.5, True)
        return F.dropout(self.scale * self.down(F.dropout(both + 1, 0.2, True, True)), p=1 / 3)


class Parted(nn.Module):
    """A block that is no graph, and whose part is one."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Scaled()

    def forward(self, x: Tensor) -> Any:
        torch._dynamo.graph_break()
        return self.part(x)


class Model(LightningModule):
    """A model of such blocks.

    Args:
        block: their class.
        recomputes: whether it recomputes them itself, as models of Hugging Face do.
    """

    def __init__(self, block: type[nn.Module], recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.recomputes = recomputes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            if isinstance(x, tuple):
                x = x[0] + x[2]["part"][0]
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(block: type[nn.Module], techniques: list[Any], recomputes: bool = False) -> dict[str, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Model(block, recomputes)
    within = "layers.*.part" if block is Parted else "layers.*"
    plan = ParallelPlan(blocks="layers.*", styles={f"{within}.up": "colwise", f"{within}.down": "rowwise"})
    strategy = HybridStrategy(*techniques, plan=plan) if techniques else "auto"
    run = trainer(strategy, max_epochs=2, limit_val_batches=0, precision="64-true")
    run.fit(module, DataLoader(points(8, seed=1), 3))  # the last batch is smaller
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


CASES: dict[str, tuple[type[nn.Module], list[Any], bool]] = {
    "in the graph": (Scaled, [TP, ActivationCheckpoint(), STRICT], False),
    "selectively": (Scaled, [TP, ActivationCheckpoint("selective"), STRICT], False),
    "whole sequences": (Returns, [TensorParallel(2, sequence_parallel=False), ActivationCheckpoint(), STRICT], False),
    "by the block": (Recomputes, [TP, STRICT], False),
    "by both": (Recomputes, [TP, ActivationCheckpoint(), COMPILED], False),
    "parts": (Parted, [TP, ActivationCheckpoint(), COMPILED], False),
    "by the model": (Scaled, [TP, COMPILED], True),
    "by the model, not divided": (Scaled, [DataParallel(1), COMPILED], True),
}


@pytest.mark.exhaustive
@sampled(1, "case", CASES)
def test_blocks_with_numbers_of_their_own_train_the_same_on_batches_of_changing_sizes(case: str) -> None:
    block, techniques, recomputes = CASES[case]
    expected = begun_on_one(trained, block, [])
    for got in run_on_ranks(1 if "not" in case else 2, trained, block, techniques, recomputes):
        compare_weights(expected.result(), got, 1e-8)


DRAWN: dict[str, list[Any]] = {
    "in the graph": [TP, STRICT],
    "whole sequences": [TensorParallel(2, sequence_parallel=False), STRICT],
    "recomputed": [TP, ActivationCheckpoint(), STRICT],
    "selectively": [TP, ActivationCheckpoint("selective"), STRICT],
}


@pytest.mark.exhaustive
@sampled(2, "case", DRAWN)
def test_graphs_drop_what_would_be_dropped_without_them(case: str) -> None:
    tensor_parallel, *compiled = DRAWN[case]
    results = [run_on_ranks(2, trained, Drops, [tensor_parallel, *each]) for each in ((), compiled)]
    for expected, got in zip(*results, strict=True):
        compare_weights(expected, got, 1e-8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [(2, 0)], indirect=True)
def test_the_graph_of_a_recomputed_block_keeps_less(world: None) -> None:
    kept = {}
    for mode in (None, "selective", "full"):
        torch._dynamo.reset()
        recomputed = [ActivationCheckpoint(mode)] if mode else []  # type: ignore[arg-type]
        model = divided(mesh_of_ranks(), [Block() for _ in range(3)], *recomputed, STRICT, sequence_parallel=False)
        found: list[int] = []
        with saved_tensors_hooks(lambda tensor, found=found: found.append(tensor.nbytes) or tensor, lambda each: each):
            model(torch.randn(1, 8, WIDTH)).sum().backward()
        kept[mode] = sum(found)
        for module in model.modules():
            restore_forward(module)
    assert kept["full"] < kept["selective"] < kept[None]
