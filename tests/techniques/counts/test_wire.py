"""Who talks to whom, and how many bytes a step sends, counted on a group that only pretends to have other ranks.

A ring sends (d - 1) / d of a message of d ranks for a gather or a scatter, and twice that for an all_reduce; the closed
forms below are in these units of all parameters. Flags, padding and what is logged must stay below a hundredth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel import DataParallel, HybridStrategy, Zero
from lightning_parallel.mesh import AXES, ParallelMesh
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.techniques.zero.sharded.parameters import UNIT_BYTES
from tests.models import build, loaders
from tests.tiers import covering
from tests.trainers import trainer

RANKS = 8
RING = {
    "allreduce_": 2,
    "_allgather_base_": 1,
    "allgather_": 1,
    "_reduce_scatter_base_": 1,
    "alltoall_base_": 1,
    "barrier": 0,
    "broadcast_": 0,  # of setup only
}


class Wire(TorchDispatchMode):
    """Counts the bytes that one rank sends by the size of the group, and with the calls by the kind of message."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[int] = Counter()
        self.calls: Counter[str] = Counter()
        self.sent_by: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.count(function._opname, args)
        return function(*args, **(kwargs or {}))

    def count(self, operation: str, args: tuple[Any, ...]) -> None:
        ranks = next(size for size in map(group_size, args) if size)
        largest = max((bytes_of(arg) for arg in args), default=0)
        sent = RING[operation] * largest * (ranks - 1) // ranks
        self.calls[operation] += 1
        self.sent[ranks] += sent
        self.sent_by[operation] += sent


def group_size(arg: Any) -> int:
    is_group = isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
    return dist.ProcessGroup.unbox(arg).size() if is_group else 0


def bytes_of(arg: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor))


class LastStep(Callback):
    """Listens to the last optimizer step, with all the batches that it takes."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.wire = Wire()

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if args[-1] == self.accumulate:
            self.wire.__enter__()

    def on_train_end(self, trainer: Any, module: LightningModule) -> None:
        self.wire.__exit__(None, None, None)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group in which this process is one of many ranks; what the others send is made up."""
    ranks, rank = getattr(request, "param", (RANKS, 0))
    for name, value in {"WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)
    yield
    dist.destroy_process_group()


def bytes_sent(technique: Technique, module: LightningModule, accumulate: int) -> Counter[int]:
    """The bytes of the second optimizer step."""
    last = LastStep(accumulate)
    data = loaders("llama", 1, samples=2 * RANKS * accumulate, length=8)
    strategy = HybridStrategy(technique, process_group_backend="fake", nonfinite="continue")
    run = {"max_epochs": 1, "limit_val_batches": 0, "accumulate_grad_batches": accumulate, "callbacks": [last]}
    trainer(strategy, **run).fit(module, *data)
    return last.wire.sent


def small_llama() -> LightningModule:
    return build("llama", hidden_size=128, intermediate_size=512, num_hidden_layers=4)


def llama_of_several_units() -> LightningModule:
    module = build("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=3)
    assert sum(p.nbytes for block in module.network.model.layers for p in block.parameters()) > 2 * UNIT_BYTES
    return module


MODELS = {"llama": small_llama, "llama of several units": llama_of_several_units}

# Ranks of a group -> how often a ring of them sends all parameters, with q batches in a step. Under ZeRO 3 those in
# units, a share u of all, are gathered for backward once more; those of the root are whole until then.
Closed = Callable[[int, float], dict[int, float]]
ROWS: dict[str, tuple[Technique, Closed]] = {
    "data parallel": (DataParallel(), lambda q, u: {8: 2}),
    "zero 1": (Zero(stage=1), lambda q, u: {8: 2}),
    "zero 2": (Zero(stage=2), lambda q, u: {8: q + 1}),
    "zero 3": (Zero(stage=3), lambda q, u: {8: (2 + u) * q}),
    "hybrid zero 1": (Zero(4, stage=1, replicate=2), lambda q, u: {4: 2, 2: 2 / 4}),
    "hybrid zero 2": (Zero(4, stage=2, replicate=2), lambda q, u: {4: q + 1, 2: 2 / 4}),
    "hybrid zero 3": (Zero(4, stage=3, replicate=2), lambda q, u: {4: (2 + u) * q, 2: 2 / 4}),
}


CELLS = {f"{row}, {model}": (row, model) for row in ROWS for model in MODELS if "zero 3" in row or "units" not in model}


@covering(keep=3, accumulate=(1, 4), cell=CELLS)
def test_bytes_sent_per_step(world: None, cell: str, accumulate: int) -> None:
    row, model = CELLS[cell]
    technique, closed = ROWS[row]
    module = MODELS[model]()
    sent = bytes_sent(technique, module, accumulate)
    parameters = sum(p.nbytes for p in module.parameters())
    units = module.network.model.layers.parameters() if "units" in model else ()
    times = closed(accumulate, sum(p.nbytes for p in units) / parameters)
    expected = {ranks: often * (ranks - 1) / ranks * parameters for ranks, often in times.items()}
    assert {ranks: sent[ranks] for ranks in expected} == pytest.approx(expected, rel=0.01)
    assert sum(sent.values()) == pytest.approx(sum(expected.values()), rel=0.01)


SIZES = {"pp": 2, "dp_replicate": 4, "dp_shard": 8, "cp": 2, "tp": 4}
GRID = torch.arange(512).view(*SIZES.values())
MINE = (0, 2, 1, 0, 1)  # where rank 137 sits on it


def neighbours(*axes: str) -> list[int]:
    """The ranks that differ from 137 in these axes only."""
    along = tuple(slice(None) if axis in axes else at for axis, at in zip(AXES, MINE, strict=True))
    return GRID[along].flatten().tolist()


def members(mesh: Any) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group())


@pytest.mark.parametrize("world", [(512, 137)], indirect=True)
def test_who_talks_to_whom_among_512_ranks(world: None) -> None:
    mesh = ParallelMesh(SIZES, "cpu")
    assert GRID[MINE] == 137
    assert {axis: members(mesh[axis]) for axis in AXES} == {axis: neighbours(axis) for axis in AXES}
    assert members(mesh.data) == neighbours("dp_replicate", "dp_shard")
    assert members(mesh.fsdp) == neighbours("dp_shard", "cp")
    assert members(mesh.loss) == neighbours("dp_replicate", "dp_shard", "cp")
    both = mesh.sharded_and_replicated
    assert dist.get_process_group_ranks(both.get_group(0)) == neighbours("dp_replicate")
    assert dist.get_process_group_ranks(both.get_group(1)) == neighbours("dp_shard", "cp")
    alone = ParallelMesh({**dict.fromkeys(AXES, 1), "dp_shard": 512}, "cpu")  # an unused axis has one rank
    assert {axis: len(members(alone[axis])) for axis in AXES} == {**dict.fromkeys(AXES, 1), "dp_shard": 512}
    assert members(alone.data) == members(alone.fsdp) == members(alone.loss) == list(range(512))
