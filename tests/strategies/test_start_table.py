"""The table at the start of a fit: what it counts is what ranks hold, and it can be checked by eye."""

from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from lightning.pytorch import Callback

from lightning_parallel import (
    DataParallel,
    HybridStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from lightning_parallel.mesh import AXES
from lightning_parallel.strategies.model import start_table
from lightning_parallel.strategies.model.start_table import Row, table
from lightning_parallel.techniques.tools.shards import local
from tests.live import stepped
from tests.models import build, loaders
from tests.ranks import ranks
from tests.tiers import sampled
from tests.trainers import trainer

ADAM = partial(torch.optim.AdamW, lr=1e-3)
SGD = partial(torch.optim.SGD, lr=1e-3)


class Held(Callback):
    """Bytes on this rank of the optimizer's parameters, and of their gradients after the first of two batches.

    Parameters of other stages have no memory.
    """

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        with torch._C.DisableTorchFunctionSubclass():  # to code of users all look whole
            given = [p for p in stepped(trainer.optimizers[0]) if p.untyped_storage().nbytes()]
            if batch_idx == 0:
                self.left = sum(local(p.grad).nbytes for p in given if p.grad is not None)
            self.given = sum(local(p).nbytes for p in given)


def shown_and_held(strategy, optimizer):
    """The table's text, the row of this rank, and what the rank holds."""
    rank, held, counted, said = torch.distributed.get_rank(), Held(), [], []
    run = {"max_steps": 1, "accumulate_grad_batches": 2, "callbacks": [held], "limit_val_batches": 0}
    lines = table

    def counting(sizes, rows):
        counted.extend(rows)
        return lines(sizes, rows)

    with (
        patch.object(start_table, "table", counting),
        patch.object(start_table, "rank_zero_info", side_effect=said.append),
    ):
        trainer(strategy, **run).fit(build("llama", optimizer=optimizer), *loaders("llama", 4))
    return said, counted[rank], held


@sampled(
    1,
    ("make", "optimizer"),
    [
        (partial(HybridStrategy, DataParallel()), ADAM),
        (partial(ZeroStrategy, stage=2), partial(torch.optim.Adagrad, lr=1e-3)),
        (partial(ZeroStrategy, stage=2, offload=True), ADAM),
        (ZeroStrategy, partial(SGD, momentum=0.9)),
        (TensorParallelStrategy, partial(ADAM, fused=True)),
        (PipelineParallelStrategy, SGD),
    ],
)
@ranks(2)
def test_table_counts_what_ranks_hold(make, optimizer):
    _, row, held = shown_and_held(make(), optimizer)
    assert (row.parameters, row.gradients) == (held.given, held.left)


@ranks(2)
def test_table_of_a_pipeline_shows_blocks_and_global_batch():
    (text,), _, _ = shown_and_held(PipelineParallelStrategy(split=(1, 3)), SGD)
    head, columns, first, second, batch = text.splitlines()
    assert head == "Layout of 2 ranks: pp=2"
    assert columns.split() == ["rank", "pp", "blocks", "parameters", "gradients", "optimizer", "states"]
    assert first.split()[:4] == ["0", "0", "network.model.layers", "0"]
    assert second.split()[:4] == ["1", "1", "network.model.layers", "1-3"]
    assert batch == "Global batch: 8 samples = 4 per batch x 2 accumulated x 1 data-parallel ranks"


def rows(sizes, states=3 * 2**30):
    places = product(*(range(sizes[axis]) for axis in AXES))
    return [
        Row(place, f"node{rank // 8}", (f"net.layers.{place[0]}",), 2**20, 5 * 2**10 + rank, states)
        for rank, place in enumerate(places)
    ]


def test_table_of_few_ranks_and_of_many():
    """Of many there is a row for each stage."""
    sizes = dict.fromkeys(AXES, 1) | {"pp": 2, "dp_shard": 2}
    assert table(sizes, rows(sizes)) == [
        "Layout of 4 ranks: pp=2 x dp_shard=2",
        "rank  pp  dp_shard        blocks  parameters  gradients  optimizer states",
        "   0   0         0  net.layers 0     1.0 MiB    5.0 KiB           3.0 GiB",
        "   1   0         1  net.layers 0     1.0 MiB    5.0 KiB           3.0 GiB",
        "   2   1         0  net.layers 1     1.0 MiB    5.0 KiB           3.0 GiB",
        "   3   1         1  net.layers 1     1.0 MiB    5.0 KiB           3.0 GiB",
    ]
    sizes = dict.fromkeys(AXES, 1) | {"pp": 4, "dp_shard": 16, "tp": 8}
    lines = table(sizes, rows(sizes, states=None))
    assert lines[0] == "Layout of 512 ranks: pp=4 x dp_shard=16 x tp=8"
    assert [line.split()[0] for line in lines[2:]] == ["0-127", "128-255", "256-383", "384-511"]
    assert "node16 and 15 more" in lines[3]
    assert lines[3].endswith("5.2 KiB      after step 1")
