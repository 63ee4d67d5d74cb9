"""Mixers of features that own, wrap, share or make their weights, mixtures of several, and functions of their own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.compatibility.handwritten.attention import WIDTH
from tests.compatibility.handwritten.features import WIDE, Mlp


class Lora(nn.Module):
    """A frozen map and a narrow one beside it."""

    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, inner.in_features) * 0.2)
        self.lora_B = nn.Parameter(torch.randn(inner.out_features, rank) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.lora_A.T @ self.lora_B.T * 0.5


class WithLora(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = Lora(self.fc1), Lora(self.fc2)


class Adapter(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.up(F.relu(self.down(y)))


class WeightNormed(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = parametrizations.weight_norm(self.fc1)
        self.fc2 = parametrizations.weight_norm(self.fc2, dim=1)


class WeightStandardised(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.fc1.weight
        weight = (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-5)
        return self.fc2(F.relu(F.linear(x, weight, self.fc1.bias)))


class TiedUpAndDown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(x)) @ self.up.weight + self.bias


class Masked(Mlp):
    """Weights under a fixed mask, as after pruning."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(WIDE * WIDTH) % 3 > 0).view(WIDE, WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.linear(x, self.fc1.weight * self.mask, self.fc1.bias).relu())


class Generated(nn.Module):
    """Weights that another layer makes of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(WIDTH, 4 * WIDTH)
        self.base = nn.Parameter(torch.randn(4, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.make(x.mean(1)).view(-1, WIDTH, 4)
        return torch.bmm(torch.bmm(x, weights), self.base.expand(len(x), -1, -1)).tanh()


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.down = nn.Bilinear(WIDTH, 4, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, self.down(x))


class OwnParameters(nn.Module):
    """Matrices as plain parameters, under products."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(WIDTH, WIDE) * 0.1)
        self.b1 = nn.Parameter(torch.zeros(WIDE))
        self.w2 = nn.Parameter(torch.randn(WIDE, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.relu(x @ self.w1 + self.b1), self.w2)


class Transposed(OwnParameters):
    """As GPT-2's Conv1D: addmm on flattened positions."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.b1, x.view(-1, WIDTH), self.w1)
        return torch.mm(F.gelu(y), self.w2).view(x.size())


class BlockDiagonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH // 4, WIDTH // 4) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btgi,gio->btgo", x.unflatten(-1, (4, -1)), self.weight).flatten(-2)


class LowRankMap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(WIDTH, 4) * 0.3), nn.Parameter(torch.randn(4, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.u @ self.v)


class Splines(nn.Module):
    """Radial functions of each feature, and weights for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 5))
        self.base, self.spline = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH * 5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2))
        return self.base(F.silu(x)) + self.spline(basis.flatten(-2))


class SoftExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([Mlp() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[..., at, None] * expert(x) for at, expert in enumerate(self.experts))


class RoutedExperts(SoftExperts):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        y = torch.zeros_like(flat)
        for at, expert in enumerate(self.experts):
            rows = torch.where(chosen == at)[0]
            y[rows] = expert(flat[rows]) * weights[rows, None]
        return y.view_as(x)


class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.w1 = nn.Parameter(torch.randn(4, WIDTH, WIDE) * 0.1)
        self.w2 = nn.Parameter(torch.randn(4, WIDE, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        hidden = torch.einsum("btc,ecf->betf", x, self.w1).relu()
        return torch.einsum("betf,efc,bte->btc", hidden, self.w2, weights)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


class OwnFunction(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return Straight.apply(x) * x.abs().mean(dim=-1, keepdim=True)


class Quantised(Mlp):
    """Weights rounded to three values, straight through."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.fc1.weight
        scale = weight.abs().mean().clamp(min=1e-5)
        rounded = weight + ((weight / scale).round().clamp(-1, 1) * scale - weight).detach()
        return self.fc2(F.linear(x, rounded, self.fc1.bias).relu())


class Recomputed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class Hooked(Mlp):
    """Hooks on its own layers change what comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.register_forward_hook(lambda module, args, output: output * 0.5)
        self.fc2.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.fc1.register_full_backward_hook(lambda module, given, grads: (given[0] * 0.5,))


class WithoutGradient(Mlp):
    def act(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = (x > x.mean(-1, keepdim=True)).to(x.dtype)
        return x * gate


class InPlace(Mlp):
    def act(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[..., : WIDE // 2].mul_(2).add_(1)
        y.narrow(-1, 3, 5).zero_()
        return y.relu_()


class WithOut(Mlp):
    """Indexing by lists, masks and numbers."""

    def act(self, x: Tensor) -> Tensor:
        places = torch.arange(WIDE - 1, -1, -1)
        y = x.index_select(-1, places) + x[..., places.tolist()]
        return torch.where(y > 0, y, 0.1 * y) + x[..., [0]] - x[..., -1:].detach()
