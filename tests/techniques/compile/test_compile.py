"""Compiled blocks train the same; each kind of block is compiled once."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    DataParallel,
    ExpertParallel,
    HybridStrategy,
    ParallelPlan,
    PipelineParallel,
    TensorParallel,
    Zero,
)
from lightning_parallel.techniques.divided.in_graph import CompiledForward, inside
from lightning_parallel.techniques.tools.redirect import restore_forward
from tests.benchmarks.test_tensor_parallel import WIDTH, Block, divided, mesh_of_ranks
from tests.curves import compare_weights
from tests.grounds import ground
from tests.heard import heard
from tests.live import kept_for_backward
from tests.models import build, loaders, points
from tests.ranks import begun_on_one, run_on_ranks
from tests.techniques.counts.test_wire import world
from tests.techniques.parity import check
from tests.tiers import sampled
from tests.trainers import trainer

assert world  # a fixture

COMPILED = Compile(backend="aot_eager")
ROWS: dict[str, tuple[str, int, list[Any]]] = {
    "zero 3, recomputed": ("llama", 2, [Zero(2, stage=3), COMPILED, ActivationCheckpoint()]),
    "data parallel": ("gpt2", 2, [DataParallel(2), COMPILED]),
    "zero 2": ("llama", 2, [Zero(2, stage=2), COMPILED]),
    "tensor": ("gpt2", 1, [TensorParallel(2, sequence_parallel=False), COMPILED]),  # the graph stays one
}


@sampled(1, "row", ROWS)
def test_compiled_blocks_train_as_one_process(row: str) -> None:
    column, readers, techniques = ROWS[row]
    check(column, 2, partial(HybridStrategy, *techniques), readers, limit_val_batches=0)


class Gated(nn.Module):
    """A block with a fused weight."""

    style = "colwise 1:1"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(13, 52), nn.Linear(26, 13)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(gate.sigmoid() * up)


class Breaks(nn.Module):
    """A block that no compiler takes in one piece."""

    style = "colwise"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(13, 26), nn.Linear(26, 13)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        torch._dynamo.graph_break()
        return x + self.down(h.relu() if float(h.detach().sum()) < 1e9 else h)


class Straight(Breaks):
    """A block with a number of its own: torch compiles the first for it alone, and the next for any number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(()).item()

    def forward(self, x: Tensor) -> Any:
        return x + self.change(x)

    def change(self, x: Tensor) -> Tensor:
        return self.scale * self.down(self.up(x).relu())


class Returns(Straight):
    """A block that returns more than a tensor."""

    def forward(self, x: Tensor) -> Any:
        return x + self.change(x), None, {"scale": self.scale, "part": (x / 8, "x")}


class Recomputes(Straight):
    """A block of which the user recomputes the greater part."""

    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(self.change, x, use_reentrant=False)


@torch.compile(backend="eager", fullgraph=True)
def activated(x: Tensor, module: nn.Module | None = None) -> Tensor:
    return torch.nn.functional.gelu(x) + (0 if module is None else module.weight.sum())


class Activates(Straight):
    """A block that calls a function which the user compiled, with divided tensors and with others."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(activated(self.up(activated(x)), self.up))


class Blocks(LightningModule):
    def __init__(self, blocks: Sequence[type[nn.Module]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for block in blocks)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adds(Straight):
    """A block that adds to lists and dicts which it is given."""

    def forward(self, x: Tensor, losses: list[Tensor], sums: dict[str, Any]) -> Tensor:
        h = self.up(x).relu()
        losses.append(h.square().mean())
        sums["seen"] = sums.get("seen", 0) + h.mean()
        return x + self.down(h)


class Reads(Straight):
    """A block that reads from lists, dicts and objects which it is given."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        first, (length, *_), scales, sums, kind, parts = rest
        h = self.up(x) * scales["h"] * first[0].mean() * length * sums["h"] * parts[0]
        return x + self.down(h.to(kind[0]).relu())


class Unpacking(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x, _, rest = layer(x)
            x = x + rest["part"][0]
        return x.square().mean()


class Recomputing(Blocks):
    """A model that recomputes its blocks itself, as models of Hugging Face do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


class Listing(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses, sums, x = list[Tensor](), dict[str, Any](), batch[0]
        for layer in self.layers:
            x = layer(x, losses, sums)
        return x.square().mean() + sum(losses) + sums["seen"]


class Reading(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            scales = OrderedDict(h=x.detach().mean(), n=None)
            sums, parts = defaultdict(float, h=0.5), deque([torch.ones(1)])
            x = layer(x, [x.detach(), 3, "a"], x.shape, scales, sums, [x.dtype, x.device], parts)
        return x.square().mean()


TP, WHOLE = TensorParallel(2), TensorParallel(2, sequence_parallel=False)
STRICT = Compile(backend="aot_eager", fullgraph=True)
STAGES = [PipelineParallel(2, microbatches=2), Compile(backend="aot_eager", dynamic=True)]
CASES: dict[str, tuple[type[Blocks], type[nn.Module], list[Any]]] = {
    "a fused weight": (Blocks, Gated, [TP, STRICT]),
    "writes lists and dicts": (Listing, Adds, [TP, COMPILED]),
    "calls what the user compiled": (Blocks, Activates, [TP, COMPILED]),
    "breaks a graph": (Blocks, Breaks, [TP, COMPILED]),
    "what the user compiled, alone": (Blocks, Activates, [TP]),
    "reads lists and dicts": (Reading, Reads, [TP, STRICT]),
    "recomputed in the graph": (Blocks, Straight, [TP, ActivationCheckpoint(), STRICT]),
    "sequences whole": (Unpacking, Returns, [WHOLE, ActivationCheckpoint("selective"), STRICT]),
    "recomputed by the block": (Blocks, Recomputes, [TP, ActivationCheckpoint(), COMPILED]),
    "recomputed by the model": (Recomputing, Straight, [TP, COMPILED]),
    "stages, for changing lengths": (Blocks, Gated, STAGES),
    "stages that break a graph": (Blocks, Breaks, STAGES),
}
DEFAULT = ("writes lists and dicts", "breaks a graph")


def trained(case: str, techniques: list[Any]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights, and what is said of blocks that run as they are."""
    torch.manual_seed(0)
    kind, block, _ = CASES[case]
    torch._dynamo.reset()
    module = kind((block, block, block))
    plan = ParallelPlan(blocks="layers.*", styles={"layers.*.up": block.style, "layers.*.down": "rowwise"})
    strategy = HybridStrategy(*techniques, plan=plan) if techniques else "auto"
    run = trainer(strategy, max_epochs=1, limit_val_batches=0, accumulate_grad_batches=2, precision="64-true")
    with heard() as lines:
        run.fit(module, DataLoader(points(8, seed=1), 3))  # two of three and one of two
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return weights, [line for line in lines if "runs uncompiled" in line]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else (pytest.mark.exhaustive,)) for case in CASES]
)
def test_compiled_divided_blocks_train_as_one_process(case: str) -> None:
    begun = begun_on_one(trained, case, [])
    found = run_on_ranks(2, trained, case, CASES[case][2])
    for weights, _ in found:
        compare_weights(begun.result()[0], weights, 1e-8)
    if case == "breaks a graph":
        assert [len(said) for _, said in found] == [1, 0], "blocks of a kind are told of once"


@sampled(1, ("column", "mode"), [("llama", "full"), ("gpt", "selective"), ("llama", None)])
def test_blocks_share_one_graph(column: str, mode: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = build(column)
    model.configure_model()
    techniques: list[Any] = [COMPILED] if mode is None else [ActivationCheckpoint(mode), COMPILED]
    for technique in techniques:
        technique.divide(model, ground(model), None)
    batch = next(iter(loaders(column, 4).train))
    loss = model.loss(batch) if column == "llama" else model._loss(batch)[0]
    loss.backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    for module in model.modules():
        restore_forward(module)


def graphs_of_a_fit(column: str, techniques: list[Any], **model: Any) -> tuple[int, int, int]:
    """How many graphs a fit without a validation made, of how many operations, and how often one was given up."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    going_on = trainer(HybridStrategy(*techniques), max_epochs=1, limit_train_batches=3, limit_val_batches=0)
    going_on.fit(build(column, **model), *loaders(column, 4))
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"], counters["unimplemented"].total()


@sampled(
    1,
    ("column", "techniques"),
    [("llama", [TP]), ("gpt", [DataParallel(2)]), ("llama", [TP, ActivationCheckpoint("selective")])],
)
def test_run_makes_each_graph_once(column: str, techniques: list[Any]) -> None:
    """Though its first steps are watched for what they log."""
    for graphs, _, given_up in run_on_ranks(2, graphs_of_a_fit, column, [*techniques, COMPILED]):
        assert (graphs <= 2, given_up) == (True, 0)  # the first block's input may be of another kind


@pytest.mark.exhaustive
def test_blocks_with_experts_share_graphs_however_many() -> None:
    techniques = [DataParallel(2), ExpertParallel(2), ActivationCheckpoint("selective"), COMPILED]
    few, many = (run_on_ranks(2, graphs_of_a_fit, "moe", techniques, n_layers=n)[0] for n in (4, 7))
    assert few[:2] == many[:2]


@pytest.mark.parametrize("world", [(2, 0)], indirect=True)
def test_graphs_do_not_ask_for_what_the_package_contains(world: None) -> None:
    torch._dynamo.reset()
    model = divided(mesh_of_ranks(), [Block()], COMPILED, sequence_parallel=False)
    model(torch.randn(1, 8, WIDTH))
    (graph,) = cached(compiled_forward(model.model.blocks[0])._graphs)
    lines = [line.partition("  # ")[0] for line in str(graph.guard_manager).splitlines()]
    asked = [line for line in lines if "Manager: " not in line]
    assert 100 < len(asked) < 300  # of 810
    assert not [line for line in asked if "lightning_parallel_dot_techniques_dot_divided_dot_rules" in line]
    assert not [line for line in asked if "_pytree" in line]
    assert [line for line in asked if "'word'" in line]
    for module in model.modules():
        restore_forward(module)


def cached(graphs: Any) -> list[Any]:
    region = graphs.inside._isolate_recompiles_id
    found: list[Any] = torch._dynamo.eval_frame._get_cache_entries_for_region(inside, region)
    return found


def compiled_forward(block: nn.Module) -> CompiledForward:
    redirected: Any = block.forward
    return redirected.wrapped


@pytest.mark.parametrize("world", [(2, 0)], indirect=True)
@sampled(1, "sequence_parallel", [True, False])
def test_graphs_wait_once_for_each_message(world: None, sequence_parallel: bool) -> None:
    torch._dynamo.reset()
    model = divided(mesh_of_ranks(), [Block()], COMPILED, sequence_parallel=sequence_parallel)
    model(torch.randn(1, 8, WIDTH)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as found:
        model(torch.randn(1, 8, WIDTH)).sum().backward()
    calls = Counter(event.name for event in found.events() if event.name.startswith("_c10d_functional::"))
    waits = calls.pop("_c10d_functional::wait_tensor")
    assert waits == calls.total() >= 4
    for module in model.modules():
        restore_forward(module)


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


def dropped(techniques: list[Any]) -> dict[str, Tensor]:
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
    results = [run_on_ranks(2, dropped, each) for each in ([], compiled)]
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
