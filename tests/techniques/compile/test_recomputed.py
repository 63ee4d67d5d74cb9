"""Graphs of compiled blocks that are recomputed in backward: what they draw, and what they keep."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import ActivationCheckpoint, Compile, HybridStrategy, ParallelPlan, TensorParallel
from lightning_parallel.techniques.tools.redirect import restore_forward
from tests.benchmarks.test_tensor_parallel import WIDTH, Block, divided, mesh_of_ranks
from tests.curves import compare_weights
from tests.live import kept_for_backward
from tests.models import points
from tests.ranks import run_on_ranks
from tests.techniques.compile.test_compile import Blocks
from tests.techniques.counts.test_wire import world
from tests.trainers import trainer

assert world  # a fixture

STRICT = Compile("aot_eager", fullgraph=True)


class Drops(nn.Module):
    """A block that draws in several ways, of one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(13, 26), nn.Linear(26, 13)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.up(x), 0.3)
        both = F.dropout(hidden, 0.5) + torch.dropout(hidden, 0.5, True)
        return x + F.dropout(self.down(F.dropout(both + 1, 0.2, True, True)), p=1 / 3)


class Slow(Blocks):
    """Three blocks that draw would diverge at the rate of `Blocks`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / 100


def trained(techniques: list[Any]) -> dict[str, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Slow([Drops] * 3)
    plan = ParallelPlan(blocks="layers.*", styles={"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    strategy = HybridStrategy(TensorParallel(2), *techniques, plan=plan)
    run = trainer(strategy, max_epochs=2, limit_val_batches=0, precision="64-true")
    run.fit(module, DataLoader(points(8, seed=1), 3))  # the last batch is smaller
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", [[STRICT], [ActivationCheckpoint("selective"), STRICT]])
def test_graphs_drop_what_would_be_dropped_without_them(compiled: list[Any]) -> None:
    results = [run_on_ranks(2, trained, each) for each in ([], compiled)]
    for expected, got in zip(*results, strict=True):
        compare_weights(expected, got, 1e-8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [(2, 0)], indirect=True)
def test_graph_of_a_recomputed_block_keeps_less(world: None) -> None:
    kept = {}
    for mode in (None, "selective", "full"):
        torch._dynamo.reset()
        recomputed = [ActivationCheckpoint(mode)] if mode else []  # type: ignore[arg-type]
        model = divided(mesh_of_ranks(), [Block() for _ in range(3)], *recomputed, STRICT, sequence_parallel=False)
        x = torch.randn(1, 8, WIDTH)
        kept[mode] = kept_for_backward(lambda model=model, x=x: model(x))
        for module in model.modules():
            restore_forward(module)
    assert kept["full"] < kept["selective"] < kept[None]
