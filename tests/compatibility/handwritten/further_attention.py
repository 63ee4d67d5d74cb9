"""Attention that does more than to weigh values by scores: turned, in windows, through few places, and torch's own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compatibility.handwritten.attention import HEADS, LONGEST, SIZE, WIDTH, Separate, attend, causal


class Rotary(Separate):
    def angles(self, x: Tensor) -> Tensor:
        inverse = 1.0 / 10000 ** (torch.arange(0, SIZE, 2, dtype=x.dtype) / SIZE)
        return torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), inverse)

    def turned(self, x: Tensor) -> Tensor:
        angles = torch.cat([self.angles(x)] * 2, dim=-1)
        one, other = x[..., : SIZE // 2], x[..., SIZE // 2 :]
        return x * angles.cos() + torch.cat([-other, one], dim=-1) * angles.sin()

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)


class RotaryComplex(Rotary):
    def turned(self, x: Tensor) -> Tensor:
        angles = self.angles(x)
        turns = torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)


class RotaryInterleaved(Rotary):
    def turned(self, x: Tensor) -> Tensor:
        angles, even, odd = self.angles(x), x[..., ::2], x[..., 1::2]
        return torch.stack(
            [even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1
        ).flatten(-2)


class Window(Separate):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2])
        near = (at[:, None] >= at) & (at[:, None] - at < 5)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


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


class Retention(Separate):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[2], dtype=q.dtype)
        decay = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=q.dtype))
        weights = decay[:, None, None] ** (at[:, None] - at).clamp(min=0) * causal(len(at))
        return (q @ k.mT * weights) @ v / SIZE


class GatedHeads(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS)
        self.strength = nn.Parameter(torch.ones(1, HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        y = attend(q, k, v) * torch.sigmoid(self.gate(x)).transpose(1, 2)[..., None] * self.strength
        return self.out_proj(y.transpose(1, 2).flatten(2))


class Differential(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(0.3))
        self.norm = nn.GroupNorm(HEADS // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        wide = torch.cat([v[:, ::2], v[:, 1::2]], -1)
        y = attend(q[:, ::2], k[:, ::2], wide) - self.strength * attend(q[:, 1::2], k[:, 1::2], wide)
        y = y.transpose(1, 2).flatten(2)
        return self.out_proj(self.norm(y.transpose(1, 2)).transpose(1, 2))


class Sinks(Separate):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / SIZE**0.5).masked_fill(~causal(q.shape[2]), -1e9)
        sinks = self.sinks.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


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


class BestOnly(Separate):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~causal(q.shape[2]), -1e9)
        best = scores.topk(3, dim=-1).values[..., -1:]
        return scores.masked_fill(scores < best, -1e9).softmax(-1) @ v


class Latents(Separate):
    """A few learned queries read all positions, and all positions read them."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, WIDTH))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        latents = self.heads(self.latents[None]).expand(q.shape[0], -1, -1, -1)
        read = F.scaled_dot_product_attention(latents, k, v)
        return F.scaled_dot_product_attention(q, latents, read)


class TwoAxes(Separate):
    """Positions as a grid, read along rows and then along columns."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        q, k, v = (F.pad(x, (0, 0, 0, -length % 6)).unflatten(2, (-1, 6)) for x in (q, k, v))
        rows = F.scaled_dot_product_attention(q, k, v)
        columns = F.scaled_dot_product_attention(*(x.transpose(2, 3) for x in (q, k, rows))).transpose(2, 3)
        return columns.flatten(2, 3)[:, :, :length]


class LowRank(nn.Module):
    """Keys and values through one narrow tensor, with one part of the key for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * (SIZE + 4))
        self.kv_down = nn.Linear(WIDTH, 12 + 4)
        self.kv_norm = nn.RMSNorm(12)
        self.kv_up = nn.Linear(12, HEADS * 2 * SIZE)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, HEADS, -1).transpose(1, 2)
        narrow, shared = self.kv_down(x).split([12, 4], dim=-1)
        k, v = self.kv_up(self.kv_norm(narrow)).view(b, t, HEADS, 2 * SIZE).transpose(1, 2).split([SIZE, SIZE], -1)
        k = torch.cat([k, shared[:, None].expand(-1, HEADS, -1, -1)], dim=-1)
        return self.o_proj(attend(q, k, v).transpose(1, 2).reshape(b, t, -1))


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
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class OfTorchWithWeights(OfTorch):
    """Asks for the weights, and uses them."""

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, attn_mask=~causal(x.shape[1]), average_attn_weights=False)
        return y * weights.amax(dim=(1, 3)).unsqueeze(-1)


class LayerOfTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, src_mask=~causal(x.size(1)))


class Functional(nn.Module):
    """torch's function on parameters of one's own, positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.1)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * WIDTH))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        given = (self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0, self.out_proj.weight)
        y, _ = F.multi_head_attention_forward(
            x, x, x, WIDTH, HEADS, *given, self.out_proj.bias, attn_mask=~causal(len(x)), need_weights=False
        )
        return y.transpose(0, 1)
