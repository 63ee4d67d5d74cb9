"""The table at the start of a fit: what it counts is what ranks hold, and it can be checked by eye."""

from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_parallel import (
    DataParallel,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    Zero,
    ZeroStrategy,
)
from lightning_parallel.mesh import AXES
from lightning_parallel.strategies.model import start_table
from lightning_parallel.strategies.model.start_table import Row, numbered, spans, table
from lightning_parallel.techniques.tools.shards import local
from tests.live import LEFT, stepped
from tests.models import build, loaders
from tests.ranks import ranks
from tests.tiers import sampled
from tests.trainers import trainer

ADAM = partial(torch.optim.AdamW, lr=1e-3)
SGD = partial(torch.optim.SGD, lr=1e-3)


class Held(Callback):
    """Bytes on this rank of what the optimizer was given: a hook that asks the module is shown all of it.

    Gradients are those after the first of two batches, states those after the step. Parameters of other stages have
    the memory of one element.
    """

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        given = [p for p in stepped(trainer.optimizers[0]) if 0 not in p.stride()]
        if batch_idx == 0:
            self.left = sum(local(left).nbytes for left in map(LEFT, given) if left is not None)
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.states = sum(local(value).nbytes for value in states if isinstance(value, Tensor))
        self.given = sum(local(p).nbytes for p in given)


def counted_and_held(strategy, optimizer):
    rank, held, counted = torch.distributed.get_rank(), Held(), []
    fitting = trainer(strategy, max_steps=1, accumulate_grad_batches=2, callbacks=[held], limit_val_batches=0)
    with patch.object(start_table, "table", side_effect=lambda sizes, rows: counted.extend(rows) or []):
        fitting.fit(build("llama", optimizer=optimizer), *loaders("llama", 4))
    return counted[rank], held


@sampled(
    1,
    ("strategy", "optimizer"),
    [
        (partial(HybridStrategy, DataParallel()), ADAM),
        (partial(ZeroStrategy, stage=1), ADAM),
        (partial(ZeroStrategy, stage=2), partial(torch.optim.Adagrad, lr=1e-3)),
        (partial(ZeroStrategy, stage=2, offload=True), ADAM),
        (ZeroStrategy, partial(SGD, momentum=0.9)),
        (TensorParallelStrategy, partial(ADAM, fused=True)),
        (PipelineParallelStrategy, SGD),
    ],
)
@ranks(2)
def test_it_counts_what_ranks_hold(strategy, optimizer):
    row, held = counted_and_held(strategy(), optimizer)
    assert (row.parameters, row.gradients) == (held.given, held.left)


@pytest.mark.exhaustive
@ranks(4)
def test_it_counts_what_ranks_hold_of_a_hybrid():
    row, held = counted_and_held(HybridStrategy(PipelineParallel(2), Zero(2, stage=2)), ADAM)
    assert (row.parameters, row.gradients) == (held.given, held.left)


@ranks(2)
def test_pipeline_shows_its_blocks_and_the_global_batch():
    said = []
    strategy = PipelineParallelStrategy(split=(1, 3))
    fitting = trainer(strategy, max_steps=1, accumulate_grad_batches=2, limit_val_batches=0)
    with patch.object(start_table, "rank_zero_info", side_effect=said.append):
        fitting.fit(build("llama"), *loaders("llama", 4))
    (text,) = said
    head, columns, first, second, batch = text.splitlines()
    assert head == "Layout of 2 ranks: pp=2"
    assert columns.split() == ["rank", "pp", "blocks", "parameters", "gradients", "optimizer", "states"]
    assert first.split()[:4] == ["0", "0", "network.model.layers", "0"]
    assert second.split()[:4] == ["1", "1", "network.model.layers", "1-3"]
    assert batch == "Global batch: 8 samples = 4 a batch x 2 accumulated x 1 readers"


def rows(sizes, states=3 * 2**30):
    places = product(*(range(sizes[axis]) for axis in AXES))
    return [
        Row(place, f"node{rank // 8}", (f"net.layers.{place[0]}",), 2**20, 5 * 2**10 + rank, states)
        for rank, place in enumerate(places)
    ]


def test_table_of_a_few_ranks():
    sizes = dict.fromkeys(AXES, 1) | {"pp": 2, "dp_shard": 2}
    assert table(sizes, rows(sizes)) == [
        "Layout of 4 ranks: pp=2 x dp_shard=2",
        "rank  pp  dp_shard        blocks  parameters  gradients  optimizer states",
        "   0   0         0  net.layers 0     1.0 MiB    5.0 KiB           3.0 GiB",
        "   1   0         1  net.layers 0     1.0 MiB    5.0 KiB           3.0 GiB",
        "   2   1         0  net.layers 1     1.0 MiB    5.0 KiB           3.0 GiB",
        "   3   1         1  net.layers 1     1.0 MiB    5.0 KiB           3.0 GiB",
    ]


def test_table_of_many_ranks_has_a_row_for_each_stage():
    sizes = dict.fromkeys(AXES, 1) | {"pp": 4, "dp_shard": 16, "tp": 8}
    lines = table(sizes, rows(sizes, states=None))
    assert lines[0] == "Layout of 512 ranks: pp=4 x dp_shard=16 x tp=8"
    assert [line.split()[0] for line in lines[2:]] == ["0-127", "128-255", "256-383", "384-511"]
    assert "node16 and 15 more" in lines[3]
    assert lines[3].endswith("5.2 KiB      after step 1")


def test_numbers_are_told_short():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert numbered(["a.block.0", "a.block.1", "b.block.0", "c"]) == "a.block 0-1; b.block 0; c"
    assert [start_table.amount(size) for size in (0, 1023, 2048, 2**31)] == ["0 B", "1023 B", "2.0 KiB", "2.0 GiB"]
