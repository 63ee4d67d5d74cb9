"""What mixes features, position by position or nearly so."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDTH, WIDE, bias=False)
        self.down_proj = nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FusedGate(Mlp):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def act(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class InterleavedGate(FusedGate):
    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x[..., ::2]).clamp(max=3.0) * (x[..., 1::2] + 1)


class SquaredRelu(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return F.relu(x) ** 2


class Maxout(FusedGate):
    def act(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], WIDTH, 2).max(dim=-1)[0]


class Prelu(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.prelu = nn.PReLU(WIDE)

    def act(self, x: Tensor) -> Tensor:
        return self.prelu(x.flatten(0, 1)).view_as(x)


class InnerNorm(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)

    def act(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()


class InnerGroupNorm(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, WIDE)

    def act(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]).relu()


class InnerSoftmax(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return x.softmax(dim=-1) * WIDE


class ByLength(Mlp):
    """Divides by a norm written by hand."""

    def act(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6)


class Standardised(Mlp):
    def act(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) * torch.rsqrt(variance + 1e-5)


class BestFew(Mlp):
    def act(self, x: Tensor) -> Tensor:
        values, places = x.topk(8, dim=-1)
        return torch.zeros_like(x).scatter_(-1, places, values.relu())


class Sorted(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return x.sort(dim=-1, descending=True).values


class Turned(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return torch.rot90(x.unflatten(-1, (8, 8)), 1, (-2, -1)).flatten(-2)


class Cumulated(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return x.cumsum(-1) / torch.arange(1, x.shape[-1] + 1)


class FourierOfFeatures(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x, dim=-1, norm="ortho").abs().repeat(1, 1, 2)[..., :WIDE]


class Shuffled(Mlp):
    """Groups of channels change places, as in ShuffleNet."""

    def act(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], 4, -1).transpose(2, 3).reshape(x.shape).relu()


class Neighbours(Mlp):
    def act(self, x: Tensor) -> Tensor:
        return x.roll(1, -1) * x + x.diff(dim=-1, prepend=x[..., :1])


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


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDE)
        self.squeeze = nn.Sequential(nn.Linear(WIDE, 8), nn.ReLU(), nn.Linear(8, WIDE), nn.Sigmoid())
        self.out = nn.Linear(WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return self.out(x * self.squeeze(x.mean(dim=1, keepdim=True)))


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform, self.carry = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.carry(x))
        return gate * self.transform(x).tanh() + (1 - gate) * x


class Scaled(Mlp):
    """A factor of its own for each feature of the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.skip = nn.Parameter(torch.full((WIDTH,), 0.1)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * super().forward(x) + self.skip * x
