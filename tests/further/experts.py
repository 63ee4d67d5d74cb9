"""Mixtures of experts as users write them, and our GPT with experts, balanced in each way."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_parallel import ParallelPlan
from tests.models import IGNORED, OWN, VOCABULARY, LanguageModel, MakeOptimizer, adamw, owned

WIDTH, INNER = 16, 24


class Router(nn.Module):
    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.classify, self.k = nn.Linear(WIDTH, experts), k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = self.classify(x).softmax(-1).topk(self.k)
        return weights / weights.sum(-1, keepdim=True), index


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) * self.gain


class Looped(nn.Module):
    """Loops over a list of experts, with one that all tokens share."""

    def __init__(self, experts: int = 4, k: int = 2) -> None:
        super().__init__()
        self.router, self.shared = Router(experts, k), Expert()
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.flatten(0, 1)
        weights, index = self.router(x)
        result = self.shared(x).clone()
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(index == number)
            if len(row):
                result.index_add_(0, row, expert(x[row]) * weights[row, slot, None])
        return result.view_as(hidden)


class Bank(nn.Module):
    """Stacked experts with biases, a norm that all share, and a gain for each."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(experts, *s) / 4) for s in ((WIDTH, INNER), (INNER, WIDTH)))
        self.bias = nn.Parameter(torch.randn(experts, INNER) / 4)
        self.gain = nn.Parameter(torch.rand(experts) + 0.5)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, which: Tensor, how_much: Tensor) -> Tensor:
        result = torch.zeros_like(tokens)
        for number in range(len(self.up)):
            place = (which == number).nonzero()
            row, slot = place[..., :-1].unbind(-1), place[..., -1]
            inner = F.silu(tokens[row] @ self.up[number] + self.bias[number])
            made = self.norm(inner @ self.down[number]) * self.gain[number]
            result = result.index_put(row, made * how_much[(*row, slot)][:, None], accumulate=True)
        return result


class Mixing(Bank):
    """What it makes of a token depends on the others."""

    def forward(self, tokens: Tensor, which: Tensor, how_much: Tensor) -> Tensor:
        return super().forward(tokens, which, how_much) * torch.sigmoid(tokens.cumsum(1)[..., :1])


class Dense(Bank):
    """Computes all experts for all tokens."""

    def forward(self, tokens: Tensor, how_much: Tensor) -> Tensor:
        inner = F.silu(torch.einsum("bti,eio->ebto", tokens, self.up) + self.bias[:, None, None])
        made = self.norm(torch.einsum("ebti,eio->ebto", inner, self.down)) * self.gain.view(-1, 1, 1, 1)
        return torch.einsum("ebto,bte->bto", made, how_much)


class Banked(nn.Module):
    """A router and stacked experts."""

    def __init__(self, experts: int = 4, k: int = 2, bank: type[Bank] = Bank) -> None:
        super().__init__()
        self.router, self.experts = Router(experts, k), bank(experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x)
        return self.experts(x, index, weights)


class BankedDense(Banked):
    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x)
        return self.experts(x, torch.zeros(*x.shape[:-1], 4, dtype=x.dtype).scatter(-1, index, weights))


class Flat(Banked):
    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x.flatten(0, 1))
        return self.experts(x.flatten(0, 1), index, weights).view_as(x)


class Slots(Bank):
    """Returns what each chosen expert made, (..., k, features)."""

    def forward(self, tokens: Tensor, which: Tensor, how_much: Tensor) -> Tensor:
        slots = zip(which.split(1, -1), how_much.split(1, -1), strict=True)
        return torch.stack([Bank.forward(self, tokens, *slot) for slot in slots], -2)


class BankedSlots(Banked):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(-2)


class Block(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.mixture, self.norm, self.mix = mixture, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None])
        return x + self.mixture(self.norm(x))


class Network(nn.Module):
    def __init__(self, mixtures: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(map(Block, mixtures))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mixture(LanguageModel):
    def __init__(
        self, mixture: type[nn.Module], optimizer: MakeOptimizer = adamw, bank: type[Bank] | None = None, n: int = 4
    ) -> None:
        given = {} if bank is None else {"bank": bank}
        super().__init__(Network([mixture(n, 2, **given) for _ in range(2)]), optimizer)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.network(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


class TiedBanks(Mixture):
    """Two layers share a weight of their experts, and another is tied to a part that no experts have."""

    def __init__(self, optimizer: MakeOptimizer = adamw) -> None:
        super().__init__(Banked, optimizer)
        first, second = (block.mixture for block in self.network.blocks)
        second.experts.up = first.experts.up
        second.down = first.experts.down


class Reversing(Mixture):
    """One rank takes its blocks the other way round."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, blocks = self.network.embed(batch["input_ids"]), list(self.network.blocks)
        for block in blocks[::-1] if self.global_rank else blocks:
            x = block(x)
        return F.cross_entropy(self.network.head(x).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


class Named(Mixture):
    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks="network.blocks.*", experts="network.blocks.*.mixture.experts")


class Penalized(Mixture):
    """A penalty on all weights, in the step."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) + 1e-3 * sum(parameter.square().sum() for parameter in self.parameters())


def own_moe(optimizer: MakeOptimizer | None = None, **overrides: Any) -> LightningModule:
    from recipes.moe import MoEModule

    experts = {"n_experts": 8, "top_k": 2, "expert_dim": 16, "n_shared": 1, "dense_layers": 1}
    return owned(MoEModule, optimizer)(OWN | experts | overrides, learning_rate=1e-2, warmup_steps=2)


GROUPED = {"score": "sigmoid", "n_groups": 4, "top_groups": 2, "group_experts": 2, "scaling": 2.5}
MODELS = {
    "moe": partial(own_moe, balance="none"),
    "moe aux": partial(own_moe, balance="aux", z_weight=0.01),
    "moe bias": partial(own_moe, balance="bias", bias_rate=0.01, **GROUPED),
    "penalized_banks": partial(Penalized, Banked),
    "looped_experts": partial(Mixture, Looped),
    "tied_banks": TiedBanks,
    "reversing_banks": partial(Reversing, Banked),
    "slots_experts": partial(Mixture, BankedSlots, bank=Slots),
    "banked_experts": partial(Mixture, Banked),
    "flat_experts": partial(Mixture, Flat),
    "mixing_experts": partial(Mixture, Banked, bank=Mixing),
    "dense_experts": partial(Named, BankedDense, bank=Dense),
}
