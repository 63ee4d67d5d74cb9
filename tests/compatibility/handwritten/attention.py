"""Attention, written in the ways in which people write it."""

import math

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


class GroupedInTorch(Separate):
    kv_heads = 2

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class MultiQuery(Separate):
    kv_heads = 1

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


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


class RotaryComplex(Separate):
    def turned(self, x: Tensor) -> Tensor:
        inverse = 1.0 / 10000 ** (torch.arange(0, SIZE, 2, dtype=x.dtype) / SIZE)
        angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), inverse)
        turns = torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)


class WindowsApart(Separate):
    """Positions in blocks, that do not see each other; the last one is padded."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        q, k, v = (F.pad(x, (0, 0, 0, -length % 5)).unflatten(2, (-1, 5)) for x in (q, k, v))
        return attend(q, k, v).flatten(2, 3)[:, :, :length]


class TalkingHeads(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.before((q @ k.mT / SIZE**0.5).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = scores.masked_fill(~causal(q.shape[2]), -1e9).softmax(-1)
        return self.after(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v


class LinearAttention(Separate):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        return torch.einsum("bhtd,bhtde->bhte", q, state) / (q * k.cumsum(2)).sum(-1, keepdim=True)


class GatedHeads(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS)
        self.strength = nn.Parameter(torch.ones(1, HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        y = attend(q, k, v) * torch.sigmoid(self.gate(x)).transpose(1, 2)[..., None] * self.strength
        return self.out_proj(y.transpose(1, 2).flatten(2))


class LearnedKeys(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(HEADS, 3, SIZE))
        self.values = nn.Parameter(torch.randn(HEADS, 3, SIZE))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.cat([torch.ones(q.shape[2], 3, dtype=torch.bool), causal(q.shape[2])], 1)
        k = torch.cat([self.keys.expand(len(q), -1, -1, -1), k], 2)
        v = torch.cat([self.values[None].repeat(len(q), 1, 1, 1), v], 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Prefix(Separate):
    """Learned tokens before the sequence, left away again."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(2, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        longer = torch.cat((self.prefix.expand(x.size(0), -1, -1), x), dim=1)
        return super().forward(longer)[:, 2:]


class OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, SIZE, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(LONGEST, LONGEST)))

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        weights = self.query(x) @ self.key(x).transpose(-2, -1) * SIZE**-0.5
        return F.softmax(weights.masked_fill(self.tril[:t, :t] == 0, float("-inf")), dim=-1) @ self.value(x)


class ListOfHeads(nn.Module):
    """As in lectures: a list of heads, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([OneHead() for _ in range(HEADS)])
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class External(nn.Module):
    """A memory in place of keys and values, normalised twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mk, self.mv = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.mk(x).softmax(dim=1)
        return self.mv(weights / (1e-9 + weights.sum(dim=2, keepdim=True)))


class OfTorch(nn.Module):
    """Asks for the weights, and uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, attn_mask=~causal(x.shape[1]), average_attn_weights=False)
        return y * weights.amax(dim=(1, 3)).unsqueeze(-1)
