"""The loss reads parameters of a layer of another stage, of which ranks have shards or partial gradients."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import ExpertParallel, HybridStrategy, PipelineParallel, TensorParallel, Zero
from tests.models import points
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.tiers import sampled
from tests.trainers import trainer

HEADS, WIDTH = 3, 12  # heads that two ranks do not divide evenly


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in maps)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, WIDTH) / 4), nn.Parameter(torch.randn(4, WIDTH, 8) / 4)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number in range(4):
            row, slot = torch.where(chosen == number)
            made = F.linear(F.linear(tokens[row], self.up[number]).relu(), self.down[number])
            result = result.index_add(0, row, made * weights[row, slot, None])
        return result


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1, keepdim=True)
        flat = (each.flatten(0, 1) for each in (x, chosen, weights))
        return x + self.experts(*flat).view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.self_attn = nn.LayerNorm(WIDTH), Attention()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm(x))
        return x + self.down_proj(F.gelu(self.up_proj(x)))


class Penalised(LightningModule):
    def __init__(self, names: Sequence[str], block: type[nn.Module]) -> None:
        super().__init__()
        self.names = names
        self.up = nn.Linear(13, 5 * WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.up(batch[0]).unflatten(-1, (5, WIDTH))
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + sum(0.1 * self.get_parameter(name).square().sum() for name in self.names)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trained(strategy: Any, names: Sequence[str], block: type[nn.Module], batch: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Penalised([f"layers.0.{name}" for name in names], block)
    run = trainer(made(strategy), max_epochs=2, limit_val_batches=0, precision="64-true")
    run.fit(module, DataLoader(points(10, seed=1), batch))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


NORM, BIASES = ["norm.weight", "norm.bias"], ["up_proj.bias", "down_proj.bias"]  # of shards, and added to a sum
UNEVEN = [f"self_attn.{name}" for name in ("q_proj.weight", "o_proj.weight", "v_proj.bias")]
PP2 = PipelineParallel(2, microbatches=2)
EXPERTS = partial(HybridStrategy, PP2, ExpertParallel(2), Zero("auto", stage=1))


@sampled(
    1,
    ("names", "block", "strategy", "batch"),
    [
        (NORM + BIASES + UNEVEN, Block, partial(HybridStrategy, PP2, TensorParallel(2)), 4),
        (NORM + BIASES + UNEVEN, Block, partial(HybridStrategy, PP2, TensorParallel(2, sequence_parallel=False)), 4),
        (["experts.up", "experts.down"], Routed, EXPERTS, 2),
    ],
    ids=["tensor", "sequence whole", "experts"],
)
def test_penalties_on_layers_of_the_first_stage_are_exact(
    names: list[str], block: type[nn.Module], strategy: Any, batch: int
) -> None:
    one, many = (None, names, block, 4), (strategy, names, block, batch)
    assert_like_one_device(trained, 4, one, many, rtol=1e-9, atol=1e-11)
