"""What is trained in the benchmarks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    """A transformer block of 12 width^2 parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.queries_keys_values(self.norms[0](x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(LightningModule):
    """Four blocks of width 256 (3.2 M parameters), stepped by a fused AdamW."""

    def __init__(self, width: int = 256, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(blocks))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class ShardedTransformer(Transformer):
    """The same, as a user of Lightning's ModelParallelStrategy writes it: every block sharded, then the whole."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


class Tiny(LightningModule):
    """Two layers of 32 x 32 and SGD: nothing to compute, so what is measured is what happens around it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.network(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ShardedTiny(Tiny):
    """The same, sharded in one piece, as a user of Lightning's ModelParallelStrategy writes it."""

    def configure_model(self) -> None:
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])
