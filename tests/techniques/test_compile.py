"""Compiled blocks train the same; each kind of block is compiled once."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel.plan import ParallelPlan
from lightning_parallel.strategies.named import HybridStrategy
from lightning_parallel.techniques.activation_checkpoint import ActivationCheckpoint
from lightning_parallel.techniques.compile import Compile
from lightning_parallel.techniques.data_parallel import DataParallel
from lightning_parallel.techniques.divided.boundary import CompiledForward
from lightning_parallel.techniques.divided.in_graph import inside
from lightning_parallel.techniques.expert_parallel import ExpertParallel
from lightning_parallel.techniques.pipeline_parallel.technique import PipelineParallel
from lightning_parallel.techniques.tensor_parallel import TensorParallel
from lightning_parallel.techniques.tools.redirect import restore_forward
from lightning_parallel.techniques.zero import Zero
from lightning_parallel.values import put_together, taken_apart
from tests.benchmarks.test_tensor_parallel import WIDTH, Block, divided, mesh_of_ranks
from tests.curves import check_parity, compare_weights
from tests.grounds import ground
from tests.heard import heard
from tests.models import build, loaders, points
from tests.ranks import begun_on_one, run_on_ranks
from tests.techniques.tensor_layouts import TWO_BLOCKS
from tests.techniques.test_wire import world
from tests.tiers import covering, sampled
from tests.trainers import trainer

assert world  # a fixture

COMPILED = Compile(backend="aot_eager")
LAYOUTS: dict[str, tuple[str, Callable[[], list[Any]]]] = {
    "zero 3, recomputed": ("llama", lambda: [Zero(2, stage=3), COMPILED, ActivationCheckpoint()]),
    "data parallel": ("gpt2", lambda: [DataParallel(2), COMPILED]),
    "zero 1": ("llama", lambda: [Zero(2, stage=1), COMPILED]),
    "zero 2": ("llama", lambda: [Zero(2, stage=2), COMPILED]),
    "zero 3": ("gpt2", lambda: [Zero(2, stage=3), COMPILED]),
}


@sampled(1, "layout", LAYOUTS)
def test_parity(layout: str) -> None:
    column, techniques = LAYOUTS[layout]
    make = partial(HybridStrategy, *techniques())
    two_blocks = TWO_BLOCKS[column]
    check_parity(column, 2, make, data_ranks=2, max_epochs=1, limit_val_batches=0, model=two_blocks)


@pytest.mark.exhaustive
def test_so_do_divided_blocks_of_a_library() -> None:
    make = partial(HybridStrategy, TensorParallel(2, sequence_parallel=False), COMPILED)  # the graph stays one
    check_parity("gpt2", 2, make, max_epochs=1, limit_val_batches=0, model={"n_layer": 1}, data={"samples": 16})


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
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


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


def trained(blocks: Any, *techniques: Any, of: type[Blocks] = Blocks) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = of(blocks)
    plan = ParallelPlan(blocks="layers.*", styles={"layers.*.up": blocks[0].style, "layers.*.down": "rowwise"})
    strategy = HybridStrategy(*techniques, plan=plan) if techniques else "auto"
    run = trainer(strategy, max_epochs=1, limit_val_batches=0, accumulate_grad_batches=2)
    run.fit(module, DataLoader(points(8, seed=1), 3))  # two of three and one of two
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def compare_divided(block: Any, compiled: Compile) -> None:
    expected = begun_on_one(trained, (block, block))
    for got in run_on_ranks(2, trained, (block, block), TensorParallel(2), compiled):
        compare_weights(expected.result(), got, 1e-5)


def test_gradients_of_divided_fused_weights_add_up() -> None:
    compare_divided(Gated, Compile(backend="aot_eager", fullgraph=True))


def test_divided_blocks_that_break_a_graph_run_as_they_are() -> None:
    compare_divided(Breaks, COMPILED)
    of_first, of_second = run_on_ranks(2, said_of_breaks, (Breaks, Breaks), TensorParallel(2))
    assert len(of_first) == 1, "blocks of a kind are told of once"
    assert not of_second


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
            x = layer(x, [x.detach(), 3, "a"], x.shape, scales, sums, [torch.float32, x.device], parts)
        return x.square().mean()


def test_what_divided_blocks_write_into_lists_and_dicts_reaches_the_step() -> None:
    expected = begun_on_one(trained, (Adds, Adds), of=Listing)
    for got in run_on_ranks(2, trained, (Adds, Adds), TensorParallel(2), COMPILED, of=Listing):
        compare_weights(expected.result(), got, 1e-5)


@pytest.mark.exhaustive
def test_divided_blocks_that_read_lists_and_dicts_stay_graphs() -> None:
    expected, whole = begun_on_one(trained, (Reads, Reads), of=Reading), Compile(backend="aot_eager", fullgraph=True)
    for got in run_on_ranks(2, trained, (Reads, Reads), TensorParallel(2), whole, of=Reading):
        compare_weights(expected.result(), got, 1e-5)


def said_of_breaks(blocks: Any, *techniques: Any) -> list[str]:
    with heard() as lines:
        trained(blocks, *techniques, COMPILED)
    return [line for line in lines if "runs as it is" in line]


@sampled(1, "others", [(COMPILED,), ()], ids=["in compiled blocks", "alone"])
def test_what_the_user_compiled_runs_as_it_is_on_divided_tensors(others: Any) -> None:
    expected = begun_on_one(trained, (Activates, Activates))
    for got in run_on_ranks(2, trained, (Activates, Activates), TensorParallel(2), *others):
        compare_weights(expected.result(), got, 1e-5)


@pytest.mark.exhaustive
@sampled(1, "kinds", [(Gated, Gated), (Breaks, Breaks)], ids=["in one piece", "as they are"])
def test_stages_are_watched_while_blocks_are_compiled_for_changing_lengths(kinds: Any) -> None:
    expected = begun_on_one(trained, kinds)
    dynamic = Compile(backend="aot_eager", dynamic=True)
    for got in run_on_ranks(2, trained, kinds, PipelineParallel(2, microbatches=2), dynamic):
        compare_weights(expected.result(), got, 1e-5)


@pytest.mark.exhaustive
def test_the_stage_tells_whose_blocks_break_a_graph() -> None:
    told = run_on_ranks(4, said_of_breaks, (Straight, Breaks), PipelineParallel(2, microbatches=2), TensorParallel(2))
    assert [len(lines) for lines in told] == [0, 0, 1, 0]


@covering(keep=1, column=["llama", "gpt"], mode=[None, "full", "selective"])
def test_blocks_share_one_graph(column: str, mode: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = build(column)
    model.configure_model()
    techniques: list[Any] = [COMPILED] if mode is None else [ActivationCheckpoint(mode), COMPILED]
    for technique in techniques:
        technique.divide(model, ground(model), None)
    getattr(model, {"llama": "loss", "gpt": "_loss"}[column])(next(iter(loaders(column, 4).train))).backward()
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


@covering(
    keep=1,
    column=["llama", "gpt"],
    techniques=[[DataParallel(2)], [TensorParallel(2), ActivationCheckpoint("selective")], [TensorParallel(2)]],
)
def test_a_run_makes_each_graph_once(column: str, techniques: list[Any]) -> None:
    """Though its first steps are watched for what they log."""
    if column == "gpt" and techniques[0] == TensorParallel(2) and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 cannot read nn.RMSNorm of divided tensors")
    for graphs, _, given_up in run_on_ranks(2, graphs_of_a_fit, column, [*techniques, COMPILED]):
        assert (graphs <= 2, given_up) == (True, 0)  # the first block's input may be of another kind


@pytest.mark.exhaustive
@sampled(1, "mode", ["full", "selective"])
def test_blocks_with_experts_share_graphs_however_many_they_are(mode: Any) -> None:
    techniques = [DataParallel(2), ExpertParallel(2), ActivationCheckpoint(mode), COMPILED]
    few, many = (run_on_ranks(2, graphs_of_a_fit, "moe", techniques, n_layers=n)[0] for n in (4, 7))
    assert few[:2] == many[:2]


@pytest.mark.parametrize("world", [(2, 0)], indirect=True)
def test_graphs_do_not_ask_for_what_the_project_itself_contains(world: None) -> None:
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("world", [(2, 0)], indirect=True)
@sampled(1, "sequence_parallel", [True, False])
def test_graphs_are_shared_by_blocks_and_steps_of_a_run(world: None, sequence_parallel: bool) -> None:
    torch._dynamo.reset()
    model = divided(mesh_of_ranks(), [Block() for _ in range(3)], COMPILED, sequence_parallel=sequence_parallel)
    graphs = compiled_forward(model.model.blocks[0])._graphs
    made = []
    for _ in range(6):
        model(torch.randn(1, 8, WIDTH)).sum().backward()
        made.append((len(graphs._words), len(cached(graphs)), [dict(block.told[0] or {}) for block in forwards(model)]))
    assert made[-1] == made[-3]  # elements too are the same ones: none is made at each call
    assert made[-1][0] <= 3
    assert all(block._graphs is graphs for block in forwards(model))
    assert not graphs._warned
    further = divided(mesh_of_ranks(), [Block()], COMPILED, sequence_parallel=sequence_parallel)
    further(torch.randn(1, 8, WIDTH))
    assert len(cached(forwards(further)[0]._graphs)) == 1
    for module in (*model.modules(), *further.modules()):
        restore_forward(module)


def forwards(model: Any) -> list[CompiledForward]:
    return [compiled_forward(block) for block in model.model.blocks]


@pytest.mark.parametrize("value", [(), (1, [2.0, None], {"a": torch.ones(1), "b": ("c",)}), {"x": {}}, torch.ones(2)])
def test_values_are_taken_apart_and_put_together(value: Any) -> None:
    leaves, form = taken_apart(value)
    again = put_together(leaves, form)
    assert repr(again) == repr(value)
    assert all(not isinstance(leaf, (tuple, list, dict)) for leaf in leaves)
    hash(form)


class Pair(NamedTuple):
    one: Tensor
    other: int


def test_values_of_other_containers_are_those_of_pytree() -> None:
    value = (Pair(torch.ones(1), 2), {"a": Pair(torch.zeros(1), 3)})
    leaves, form = taken_apart(value)
    assert len(leaves) == 4
    assert repr(put_together(leaves, form)) == repr(value)
