"""What mixes features, position by position or nearly so."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.compatibility.handwritten.attention import WIDTH

WIDE = 2 * WIDTH


class Mlp(nn.Module):
    """Up, something, and down; others change what comes between."""

    def __init__(self, wide: int = WIDE) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDE), nn.Linear(wide, WIDTH)

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Prelu(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.prelu = nn.PReLU(WIDE)

    def act(self, x: Tensor) -> Tensor:
        return self.prelu(x.flatten(0, 1)).view_as(x)


class InnerGroupNorm(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, WIDE)

    def act(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]).relu()


class AsSignal(Mlp):
    """A convolution over features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 5, padding=2)

    def act(self, x: Tensor) -> Tensor:
        return self.conv(x.reshape(-1, 1, WIDE)).reshape(x.shape)


class ByArgmax(Mlp):
    """The nearest of a code book, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(8, WIDE)

    def act(self, x: Tensor) -> Tensor:
        nearest = self.codes(torch.cdist(x, self.codes.weight.expand(len(x), -1, -1)).argmin(axis=-1))
        return x + (nearest - x).detach() + 0.1 * nearest


class InterleavedGate(Mlp):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x[..., ::2]).clamp(max=3.0) * (x[..., 1::2] + 1)


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


class Hooked(Mlp):
    """Hooks on its own layers change what comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.register_forward_hook(lambda module, args, output: output * 0.5)
        self.fc2.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.fc1.register_full_backward_hook(lambda module, given, grads: (given[0] * 0.5,))
