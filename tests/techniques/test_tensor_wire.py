"""What tensor parallelism sends and keeps, counted on a group that only pretends to have other ranks.

A block does its work twice: what a model with one block more sends and keeps beyond another one is that block's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_parallel import HybridStrategy, TensorParallel
from lightning_parallel.techniques.divided.tensor import Divided
from tests.models import adamw, build, loaders
from tests.techniques.test_wire import RING, bytes_of, world
from tests.trainers import trainer

assert world  # a fixture

T, SEQUENCE, BATCH, WIDTH = 4, 32, 2, 128
HIDDEN = SEQUENCE * BATCH * WIDTH * 4  # bytes of a hidden state in single precision
pytestmark = pytest.mark.parametrize("world", [(T, 0)], indirect=True)


class Counts(torch.utils._python_dispatch.TorchDispatchMode):
    """How many collectives of each kind there are, and how many bytes a ring sends for them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function._opname
            self.calls[name] += 1
            self.sent[name] += RING[name] * max(bytes_of(arg) for arg in args) * (T - 1) // T
        return function(*args, **(kwargs or {}))


class SecondStep(Callback):
    """Counts what happens between the start of the second step's forward and the end of its backward."""

    def __init__(self) -> None:
        self.counts = Counts()

    def on_train_batch_start(self, *args: Any) -> None:
        if args[-1] == 1:
            self.counts.__enter__()

    def on_after_backward(self, trainer: Any, module: LightningModule) -> None:
        if trainer.global_step == 1:
            self.counts.__exit__(None, None, None)


def counted(module: LightningModule, **options: Any) -> Counts:
    second = SecondStep()
    strategy = HybridStrategy(TensorParallel(T, **options), process_group_backend="fake", nonfinite="continue")
    data = loaders("gpt", BATCH, samples=2 * BATCH, length=SEQUENCE)
    trainer(strategy, max_epochs=1, limit_val_batches=0, callbacks=[second]).fit(module, *data)
    return second.counts


def gpt(blocks: int, **options: Any) -> LightningModule:
    sizes = {"dim": WIDTH, "n_heads": 4, "n_kv_heads": 4, "hidden_dim": 4 * WIDTH, "n_layers": blocks}
    return build("gpt", optimizer=adamw, **(sizes | options))


def of_one_block(**options: Any) -> tuple[Counter[str], Counter[str]]:
    more, fewer = counted(gpt(3), **options), counted(gpt(2), **options)
    return more.calls - fewer.calls, more.sent - fewer.sent


def test_a_block_sums_four_times(world: None) -> None:
    calls, sent = of_one_block(sequence_parallel=False)
    assert calls == {"allreduce_": 4}
    assert sum(sent.values()) == pytest.approx(8 * (T - 1) / T * HIDDEN, rel=0.01)


def test_a_block_with_a_split_sequence_gathers_and_scatters_four_times(world: None) -> None:
    calls, sent = of_one_block()
    assert calls == {"_allgather_base_": 4, "_reduce_scatter_base_": 4}
    del sent["allreduce_"]  # the norms' gradients, in the one message of the step
    assert sum(sent.values()) == pytest.approx(8 * (T - 1) / T * HIDDEN, rel=0.01)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_loss_sends_numbers_for_tokens_not_for_the_vocabulary(world: None, sequence_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel}
    few, many = (counted(gpt(2, vocab_size=size), **options).sent for size in (64, 6400))
    assert few == many


class Kept:
    """Bytes of activations that a forward keeps for its backward, each storage once, without parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in map(_local, module.parameters())}
        self.storages: dict[int, Tensor] = {}

    def __enter__(self) -> Kept:
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in self._parameters:
            self.storages[address] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.storages.values())


def _local(parameter: Tensor) -> Tensor:
    if isinstance(parameter, Divided):
        return parameter.own
    return parameter._local_tensor if isinstance(parameter, torch.distributed.tensor.DTensor) else parameter


class Block(nn.Module):
    """A block whose activations the closed form describes: no biases, no dropout, fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // 4
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in maps)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Blocks(LightningModule):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.kept = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True)
        with Kept(self) as kept:
            for block in self.blocks:
                x = block(x)
        self.kept = kept.bytes
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def kept_by_a_block(**options: Any) -> float:
    kept = []
    for blocks in (3, 2):
        module = Blocks(blocks)
        strategy = HybridStrategy(TensorParallel(T, **options), process_group_backend="fake", nonfinite="continue")
        trainer(strategy, max_steps=1).fit(module, torch.utils.data.DataLoader(torch.zeros(1)))
        kept.append(module.kept)
    return (kept[0] - kept[1]) / HIDDEN


# In units of a hidden state: the inputs of both norms (2) and of the maps after them (2), which are whole where the
# region needs the whole sequence; queries, keys, values and the input of the last map of attention (4), the input and
# the output of the activation (8), divided in any case.


def test_what_a_block_keeps(world: None) -> None:
    assert kept_by_a_block(sequence_parallel=False) == pytest.approx(4 + 12 / T, rel=0.02)
    assert kept_by_a_block() == pytest.approx(2 / T + 2 + 12 / T, rel=0.02)
