"""What mixes positions without attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compatibility.handwritten.attention import LONGEST, WIDTH


class Fourier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x).real / WIDTH


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


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = self.conv(x.mT)[..., : x.shape[1]].mT
        return self.out_proj(F.silu(x) * gate)


class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pointwise_conv1 = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise_conv = nn.Conv1d(WIDTH, WIDTH, 5, padding="same", groups=WIDTH)
        self.pointwise_conv2 = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.glu(self.pointwise_conv1(x.transpose(1, 2)), dim=1)
        return self.pointwise_conv2(F.silu(self.depthwise_conv(x))).transpose(1, 2)


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)
        return self.proj(x.cumsum(dim=1) / counts.view(1, -1, 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


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


class Keyed(nn.Module):
    """RWKV's mix of a token with the one before, and its running weighted mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.full((2, WIDTH), 0.5))
        self.decay = nn.Parameter(torch.linspace(-3, 0, WIDTH))
        self.key, self.value = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.receptance, self.output = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        k, v = self.key(torch.lerp(before, x, self.mix[0])), self.value(torch.lerp(before, x, self.mix[1]))
        above, below, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
        for key, value in zip(k.exp().unbind(1), v.unbind(1), strict=True):
            above, below = above * self.decay.exp().neg().exp() + key * value, below * 0.9 + key
            out.append(above / below)
        return self.output(torch.sigmoid(self.receptance(x)) * torch.stack(out, 1))


class Selective(nn.Module):
    """A state-space mixer whose steps depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.x_proj = nn.Linear(WIDTH, 2 + 2 * 4, bias=False)
        self.dt_proj = nn.Linear(2, WIDTH)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, 5).repeat(WIDTH, 1)))
        self.D = nn.Parameter(torch.ones(WIDTH))
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.in_proj(x).chunk(2, -1)
        dt, b, c = self.x_proj(x).split([2, 4, 4], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        decay = torch.exp(dt.unsqueeze(-1) * -self.A_log.exp())
        given = dt.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
        state, out = given.new_zeros(given[:, 0].shape), []
        for at in range(x.size(1)):
            state = decay[:, at] * state + given[:, at]
            out.append((state * c[:, at, None]).sum(-1))
        return self.out_proj((torch.stack(out, 1) + self.D * x) * F.silu(z))


class StateSpaceByFourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.linspace(-3, 0, 4).repeat(WIDTH, 1))
        self.weight = nn.Parameter(torch.randn(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        times = torch.arange(t, dtype=x.dtype, device=x.device)
        kernel = (self.weight[..., None] * torch.exp(-self.log_rate.exp()[..., None] * times)).sum(1)
        spectrum = torch.fft.rfft(kernel, 2 * t) * torch.fft.rfft(x.transpose(1, 2), 2 * t)
        return torch.fft.irfft(spectrum, 2 * t)[..., :t].transpose(1, 2)


class Toeplitz(nn.Module):
    """A triangle of weights over positions, gathered by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.by_distance = nn.Parameter(torch.randn(LONGEST) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        weights = self.by_distance[(at[:, None] - at).clamp(min=0)].tril()
        return weights @ x


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


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.split(WIDTH // 2, dim=-1)
        return self.proj(torch.cat([one, torch.roll(other, shifts=1, dims=1)], dim=-1))


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


class Unfolded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1)
        return torch.einsum("btck,kcd->btd", windows, self.weight)


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x.flip(1).cumsum(1).flip([1])) / x.shape[1]


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


class Segments(nn.Module):
    """Means of segments, added up by index."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        segment = torch.arange(x.shape[1]) // 3
        count = int(segment[-1]) + 1
        sums = x.new_zeros(x.shape[0], count, WIDTH).index_add(1, segment, x)
        return self.proj((sums / torch.bincount(segment).view(1, -1, 1))[:, segment])


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


class Images(nn.Module):
    """Positions as a small picture under a two-dimensional convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        picture = F.pad(x, (0, 0, 0, -x.shape[1] % 4)).transpose(1, 2).unflatten(2, (-1, 4))
        return self.conv(picture).flatten(2).transpose(1, 2)[:, : x.shape[1]]


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
