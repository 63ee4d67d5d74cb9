"""The loss reads a parameter of a layer of another stage, of which ranks have parts or summands."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel.strategies.named import HybridStrategy
from lightning_parallel.techniques.expert_parallel import ExpertParallel
from lightning_parallel.techniques.pipeline_parallel.technique import PipelineParallel
from lightning_parallel.techniques.tensor_parallel import TensorParallel
from lightning_parallel.techniques.zero import Zero
from tests.curves import compare_weights
from tests.models import points
from tests.ranks import begun_on_one, run_on_ranks
from tests.tiers import covering, sampled
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


def trained(
    names: Sequence[str], block: type[nn.Module], make: Callable[[], Any] | None = None, batch: int = 4
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Penalised(names, block)
    run = trainer("auto" if make is None else make(), max_epochs=2, limit_val_batches=0, precision="64-true")
    run.fit(module, DataLoader(points(10, seed=1), batch))
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


PENALISED = {
    "a norm": ("norm.weight",),
    "a bias added to a sum": ("down_proj.bias",),
    "a bias of a part": ("up_proj.bias", "norm.bias"),
    "weights of uneven heads": ("self_attn.q_proj.weight", "self_attn.o_proj.weight"),
    "one map of several": ("self_attn.v_proj.bias",),
}


def compare(names: Sequence[str], block: type[nn.Module], make: Callable[[], Any], batch: int = 4) -> None:
    names = [f"layers.0.{name}" for name in names]
    expected = begun_on_one(trained, names, block)
    for got in run_on_ranks(4, trained, names, block, make, batch, timeout=30.0):
        compare_weights(expected.result(), got, 1e-9)


@covering(keep=1, what=PENALISED, sequence_parallel=(True, False))
def test_penalties_on_divided_layers_of_the_first_stage(what: str, sequence_parallel: bool) -> None:
    compare(PENALISED[what], Block, partial(beside_a_pipeline, partial(tensor, sequence_parallel)))


@sampled(1, "what", ["up", "down"])
def test_penalties_on_the_experts_of_the_first_stage(what: str) -> None:
    compare([f"experts.{what}"], Routed, partial(beside_a_pipeline, experts), batch=2)


def tensor(sequence_parallel: bool) -> list[Any]:
    return [TensorParallel(2, sequence_parallel=sequence_parallel)]


def experts() -> list[Any]:
    return [ExpertParallel(2), Zero("auto", stage=1)]


def beside_a_pipeline(make: Callable[[], list[Any]]) -> HybridStrategy:
    return HybridStrategy(PipelineParallel(2, microbatches=2), *make())
