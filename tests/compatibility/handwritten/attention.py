"""Attention, written in the ways in which people write it."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LONGEST = 32, 4, 64
SIZE = WIDTH // HEADS


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None = None) -> Tensor:
    """By hand; heads first, then positions."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) if scores is None else scores
    scores = scores.masked_fill(~causal(q.shape[-2]).to(q.device), float("-inf"))
    return scores.softmax(-1) @ v


class Separate(nn.Module):
    """Three projections and one back; others change what comes between."""

    kv_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, self.kv_heads * SIZE)
        self.v_proj = nn.Linear(WIDTH, self.kv_heads * SIZE)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, SIZE).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(self.mixed(q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHand(Separate):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def parts(self, x: Tensor) -> Any:
        return self.qkv(x).view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class HeadsFirst(Fused):
    """Three of each head together, as BLOOM keeps them."""

    def parts(self, x: Tensor) -> Any:
        return self.qkv(x).view(*x.shape[:2], HEADS, 3, SIZE).permute(3, 0, 2, 1, 4)


class Chunked(Fused):
    def parts(self, x: Tensor) -> Any:
        return [part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]


class SplitBySize(Fused):
    def parts(self, x: Tensor) -> Any:
        return [part.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(WIDTH, 2)]


class Einsum(Separate):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * SIZE**-0.5
        mask = torch.full(scores.shape[-2:], float("-inf"), dtype=q.dtype).triu(1)
        return torch.einsum("bhij,bhjd->bhid", torch.softmax(scores + mask, dim=-1), v)


class Batched(Separate):
    """Heads and samples as one dimension."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = [part.reshape(-1, *part.shape[2:]) for part in (q, k, v)]
        scores = torch.bmm(flat[0], flat[1].transpose(1, 2)) / SIZE**0.5
        scores = torch.where(causal(q.shape[2]), scores, torch.tensor(-1e9, dtype=scores.dtype))
        return torch.bmm(F.softmax(scores, -1), flat[2]).view_as(q)


class Grouped(Separate):
    kv_heads = 2

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (part.repeat_interleave(HEADS // self.kv_heads, dim=1) for part in (k, v))
        return attend(q, k, v)


class GroupedByExpand(Separate):
    kv_heads = 2

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, t, d = q.shape
        k, v = (part[:, :, None].expand(b, 2, 2, t, d).reshape(b, HEADS, t, d) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class GroupedInTorch(Separate):
    kv_heads = 2

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class MultiQuery(Separate):
    kv_heads = 1

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


class NormOfHeads(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.LayerNorm(SIZE)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self.q_norm(q), self.k_norm(k), v)


class NormAcrossHeads(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q_norm(self.q_proj(x))), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        return self.out_proj(attend(q, k, v).transpose(1, 2).flatten(2))


class Cosine(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.full((HEADS, 1, 1), 2.0))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature.exp().clamp(max=100)
        return attend(q, k, v, scores)


class Alibi(Separate):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=q.dtype)
        bias = slopes[:, None, None] * (at[None] - at[:, None])
        return attend(q, k, v, q @ k.mT / SIZE**0.5 + bias)


class RelativeBias(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(2 * LONGEST, HEADS)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.size(2))
        bias = self.bias(at[None, :] - at[:, None] + LONGEST).permute(2, 0, 1)
        return attend(q, k, v, q @ k.transpose(2, 3) + bias.unsqueeze(0))


class RelativeShift(Separate):
    """Transformer-XL's: scores by distance, shifted into place by padding and another view."""

    def __init__(self) -> None:
        super().__init__()
        self.of_distance = nn.Parameter(torch.randn(LONGEST, HEADS, SIZE) * 0.1)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, t, _ = q.shape
        by_distance = torch.einsum("bhid,jhd->bhij", q, self.of_distance[:t].flip(0))
        shifted = F.pad(by_distance, (1, 0)).view(b, h, t + 1, t)[:, :, 1:].view(b, h, t, t)
        return attend(q, k, v, (q @ k.mT + shifted) / SIZE**0.5)
