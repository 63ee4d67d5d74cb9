"""What mixes positions without attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compatibility.handwritten.attention import LONGEST, WIDTH


class FourierFilter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(LONGEST, WIDTH, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, n=2 * x.shape[1], dim=1)
        return torch.fft.irfft(spectrum * torch.view_as_complex(self.filter[: spectrum.shape[1]]), dim=1)[
            :, : x.shape[1]
        ]


class CausalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2))[..., :-2].transpose(1, 2)


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, _) = self.lstm(x.transpose(0, 1))
        return y.transpose(0, 1) + h.transpose(0, 1).flatten(1).unsqueeze(1)


class Cell(nn.Module):
    """A cell in a loop of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
            states.append(state)
        return torch.stack(states, dim=1)


class TokenMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(LONGEST, 40), nn.Linear(40, LONGEST)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (0, LONGEST - x.shape[1]))
        return self.fc2(F.gelu(self.fc1(padded)))[..., : x.shape[1]].transpose(1, 2)


class SpatialGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.spatial = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(LONGEST, LONGEST) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.proj_in(x)).chunk(2, dim=-1)
        mixed = torch.einsum("ij,bjc->bic", self.spatial[: x.shape[1], : x.shape[1]].tril(), self.norm(v))
        return self.proj_out(u * (mixed + 1))


class SortedByScore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score, self.conv = nn.Linear(WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        order = self.score(x).squeeze(-1).argsort(dim=1)
        taken = torch.gather(x, 1, order.unsqueeze(-1).expand_as(x))
        mixed = self.conv(taken.mT).mT
        return torch.zeros_like(x).scatter(1, order[..., None].expand(-1, -1, WIDTH), mixed)


class Permuted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(3))
        return self.proj(torch.cat([x, x[:, order]], dim=-1))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        small = F.avg_pool1d(x.transpose(1, 2), 4, ceil_mode=True)
        return self.proj(F.interpolate(small, size=x.shape[1], mode="linear", align_corners=False).transpose(1, 2))


class LogCumulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        decay = F.logsigmoid(self.gate(x)).cumsum(dim=1)
        return torch.exp(decay) * torch.cumsum(self.proj(x) * torch.exp(-decay), dim=1)


class FastWeights(nn.Module):
    """The delta rule: what is stored under a key is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.beta, self.proj = nn.Linear(WIDTH, 3 * 8), nn.Linear(WIDTH, 1), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        k, beta, out = F.normalize(k, dim=-1), self.beta(x).sigmoid(), []
        memory = torch.zeros(x.shape[0], 8, 8, dtype=x.dtype)
        for at in range(x.shape[1]):
            old = torch.bmm(memory, k[:, at, :, None]).squeeze(-1)
            memory = memory + torch.einsum("bi,bj->bij", beta[:, at] * (v[:, at] - old), k[:, at])
            out.append((memory @ q[:, at].unsqueeze(-1)).squeeze(-1))
        return self.proj(torch.stack(out, dim=1))


class MeanOfAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        every = torch.cat([x.mean(1), x.std(dim=1), x.max(dim=1).values], dim=-1)
        return self.norm(self.proj(every)).unsqueeze(1).expand_as(x)


class OverPositions(nn.Module):
    """Normalised over positions, per sample and feature."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class NextToken(nn.Module):
    """Asks for lengths and single elements in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = x.clone()
        y[:, 1:, : c // 2] += x[:, : t - 1, : c // 2]
        y[:, -1] = y[:, 0] / t
        return self.proj(y.contiguous().view(b * t, c)).view(b, t, c)


class Held(nn.Module):
    """Keeps what it saw on the module, and reads it again."""

    seen: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.first(x).tanh()
        return self.again() * x.shape[1] ** -0.5

    def again(self) -> Tensor:
        return self.second(self.seen).cumsum(1)
