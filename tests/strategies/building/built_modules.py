"""Modules whose builds draw, copy, read and overwrite in every way that a build with sharded parameters must follow."""

import copy
import io
import math
import random
from collections.abc import Callable
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

CPU, SAVED = torch.device("cpu"), nn.Linear(3, 3)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))


def seed() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert (tensor.dtype, tensor.stride()) == (other.dtype, other.stride()), name
        assert torch.equal(tensor, other), name


class Scaled(nn.Module):
    """GPT-2's way: defaults first, then every weight again, then some scaled by depth."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width, padding_idx=3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("0.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
                parameter.data.div_(math.sqrt(2 * depth))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()


class Initialisers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = "orthogonal_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "eye_"
        inits = [getattr(nn.init, name) for name in names]
        inits += [lambda weight: nn.init.trunc_normal_(weight, std=0.3, a=0.5, b=2.0)]
        inits += [lambda weight: nn.init.sparse_(weight, 0.5), lambda weight: nn.init.orthogonal_(weight.t())]
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(5, 9)) for _ in inits)
        for weight, init in zip(self.weights, inits, strict=True):
            with torch.no_grad():
                init(weight)
        self.unfolded = nn.Parameter(nn.init.dirac_(torch.empty(4, 4, 3)))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(6), 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8)).float()
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("conjugate", torch.polar(torch.ones_like(angles), angles).conj()[1:])
        self.register_buffer("cosines", torch.cat((angles, angles), dim=-1).cos(), persistent=False)
        self.register_buffer("table", torch.from_numpy(np.random.randn(4, 2)).float())
        self.register_buffer("legacy", torch.Tensor([1, 2]).double())
        self.register_buffer("selected", torch.arange(5)[torch.tensor([True, False, True, True, False])])
        self.register_buffer("rows", self.legacy.new_tensor([[1, 2]]).repeat(3, 1).t())
        self.register_buffer("index", torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")))
        self.index[0, 1] = 5
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("noise", torch.randn(3) + random.random())


class ReadsValues(nn.Module):
    """Reads values and devices."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        rates += torch.linspace(0, 0.1, 3, device="cpu").tolist() + list(torch.arange(3).numpy())
        rates += [float(f"{torch.tensor(0.5):.2f}")] if torch.ones(3).sum() == 3 else []
        self.weight = nn.Parameter(torch.empty(len(rates)).uniform_() * torch.tensor(rates))
        self.first = nn.Linear(3, 3, device="cpu")
        with torch.device("cpu"):
            self.second = nn.Linear(3, 3, device=self.first.weight.device).to("cpu")
        assert self.first.weight.is_cpu
        assert not self.first.weight.is_meta


class Seeds(nn.Module):
    """Plays with generators while building."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.empty(4).normal_(generator=generator))
        self.more = nn.Parameter(torch.rand(4, generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.forked = nn.Linear(3, 3)
            torch.manual_seed(5)
            self.twin = nn.Linear(3, 3)
        state = torch.get_rng_state()
        self.once = nn.Linear(3, 3)
        torch.set_rng_state(state)
        self.twice = nn.Linear(3, 3)
        torch.manual_seed(11)


def in_bfloat16() -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.ModuleList([Scaled(), Buffers()])
    finally:
        torch.set_default_dtype(default)


def copied() -> nn.Module:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    for parameter in encoder.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return encoder


def parametrized() -> nn.Module:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    return nn.Sequential(module, nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3), n_power_iterations=2))


def patched() -> nn.Module:
    """Writes parts of tensors, and a weight that depends on another."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        first.weight[1:3].fill_(2.0)
        first.weight[:, 0].normal_()
        second.weight.copy_(first.weight.t())
        first.weight.uniform_()
        second.bias += torch.randn(4).relu_()
        torch._foreach_mul_([first.bias, second.bias], 3.0)
    first.weight.data = first.weight.data.t()
    return nn.ModuleList([first, second])


def tied() -> nn.Module:
    module = nn.Module()
    module.whole = nn.Parameter(torch.randn(4, 4))
    module.same = module.whole
    module.register_buffer("part", module.whole.data[1:3].t())
    return module


def loaded() -> nn.Module:
    """Weights from a file, from another module and from an array."""
    file, first, second = io.BytesIO(), nn.Linear(3, 3), nn.Linear(3, 3)
    torch.save({"weight": SAVED.weight.detach()}, file)
    file.seek(0)
    first.load_state_dict(torch.load(file), strict=False)
    second.load_state_dict(first.state_dict())
    second.bias.data[:] = torch.as_tensor(np.arange(3.0))
    return nn.ModuleList([first, second])


def forward_run() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    with torch.no_grad():
        module.register_buffer("seen", module(torch.ones(2, 3)))
    module.append(nn.Linear(2, 2))
    return module


BUILDS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in (Scaled, Initialisers, Buffers, ReadsValues, Seeds)},
    **{build.__name__: build for build in (in_bfloat16, copied, parametrized, patched, tied, loaded, forward_run)},
    "lstm": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose1d(4, 2, 3)),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
    "deepcopy": lambda: nn.ModuleList([module := nn.BatchNorm1d(4), copy.deepcopy(module), copy.deepcopy(Buffers())]),
    "cast": lambda: Scaled().to(torch.bfloat16),
    "double by name": lambda: nn.Linear(3, 3, dtype=torch.float64),
    "skip init": lambda: nn.utils.skip_init(nn.LayerNorm, 4).apply(lambda module: module.reset_parameters()),
}
