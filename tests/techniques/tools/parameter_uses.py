"""What user code does with parameters between steps: one table, for sharded parameters and for those of stages."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

Make = Callable[[Tensor, Tensor], nn.Parameter]
"""Makes a parameter of a value and its gradient."""

Full = Callable[[Any], Any]
"""Gives the full tensor of what one process would have."""

READS = """
p.norm() | p.norm().item() | p.detach().pow(2).sum() | p.mean()
p.std() | p.var() | p.max() | p.min()
p.abs().max().item() | p.argmax() | p.median() | p.quantile(0.3)
p.flatten().sort().values | p.flatten().topk(3).values | p.cumsum(0) | p.cumsum(1)
p.cumprod(0) | p.logsumexp(0) | p.softmax(0) | p.softmax(1)
p.norm(dim=1) | p.norm(dim=0) | p.mean(0) | F.normalize(p, dim=0)
p.isnan().any() | p.isfinite().all().item() | (p == 0).sum() | p.count_nonzero()
(p > 0).float().mean().item() | p[0] | p[-1] | p[1:4]
p[:, 0] | p.flatten()[:5] | p[p > 0] | p[torch.tensor([0, 2])]
p.T @ p | p @ p.T | p.gather(0, rows) | torch.ones(3, len(p)) @ p
F.linear(torch.ones(3, 6), p) | torch.linalg.svdvals(p) | torch.linalg.matrix_norm(p) | torch.linalg.pinv(p)
torch.cdist(p, p) | F.embedding(rows, p) | torch.cat([p.flatten()] * 2) | torch.stack([p, p]).sum()
nn.utils.parameters_to_vector([p, p]) | F.cosine_similarity(p.flatten(), p.flatten() + 1, dim=0)
torch.histc(p, 4) | (p > 0).long().flatten().bincount() | p.round().unique()
torch.tensor(p.tolist()) | torch.tensor(p.detach().numpy()) | p.detach().cpu()
p.clone() | p.float().double().sum() | p.half().float() | p.to(torch.bfloat16).float()
torch.allclose(p, p.clone()) | torch.equal(p, p.clone()) | p - torch.ones(p.shape) | p * torch.tensor(2.0)
torch.where(p > 0, p, torch.zeros_like(p)) | torch.einsum("ij,ij->i", p, p)
p[:3, :3].trace() | p.diag() | p.triu() | p.roll(1, 0)
p.flip(0) | p.view(-1) | p.unsqueeze(0).sum() | p.split(2)[0]
p.chunk(2)[1] | p.max(dim=0).values | p.norm(dim=1).argsort() | torch.dist(p, p * 2)
sum(row.sum().item() for row in p) | len(p) | f"{p.norm():.4f}"
p.prod() | torch.linalg.matrix_norm(p, "nuc") | p.abs().sum(1) / p.abs().sum()
p.lerp(p * 2, 0.1) | torch._foreach_norm([p, p])[0] | F.pad(p, (1, 0))
p.repeat(2, 1) | p.unsqueeze(0).expand(2, -1, -1).sum() | p.masked_select(p > 0)
p.index_select(0, torch.tensor([1, 2])) | (p > 0).nonzero() | p.floor().sum().int()
F.conv1d(torch.ones(1, 1, 8), p.detach().flatten()[None, None, :3]) | p.renorm(2, 0, 1.0)
F.kl_div(p.log_softmax(1), p.softmax(1), reduction="sum") | F.mse_loss(p, torch.zeros(p.shape))
F.mse_loss(p, p * 2) | p.amax(0, keepdim=True) | p.norm(float("inf")) | torch.linalg.vector_norm(p, 3)
torch.where(p > 0)[0] | p.half().norm() | torch._foreach_mul([p, torch.ones(2)], 2.0)[0]
torch._foreach_norm([p, p], 1)[1] | torch.max(p, -p) | 1 / p | -p ** 2
"""

WRITES = """
p.mul_(0.5) | p.add_(p.grad, alpha=-0.1) | p.sub_(torch.ones(p.shape)) | p.clamp_(-0.5, 0.5)
p.data.clamp_(-0.5, 0.5) | p.zero_() | p.fill_(0.3) | p[0] = 0.0
p[0].zero_() | p[-1].zero_() | p.data[0].fill_(1.0) | p[1:3] *= 2
p[:, 0] = 1 | p[p > 0] = 0 | p.masked_fill_(p > 0, 0.0) | p[torch.tensor([0, 2])] = 0
p.index_fill_(0, rows[0, :1], 0.0) | p.copy_(torch.ones(p.shape)) | p.copy_(p * 2)
p.data = p.data * 2 | p.div_(p.norm()) | p.renorm_(2, 0, 0.5) | p.lerp_(p * 2, 0.5)
p.div_(p.norm(dim=1, keepdim=True)) | p.addcmul_(p, p, value=0.1) | torch._foreach_mul_([p], 0.5)
p.view(-1)[:4].zero_() | p.T[0].zero_() | p.fill_diagonal_(0) | p.copy_(F.normalize(p, dim=1))
nn.utils.vector_to_parameters(torch.arange(p.numel()).float(), [p]) | p.grad[0].zero_()
nn.utils.clip_grad_norm_([p], 0.1) | nn.utils.clip_grad_value_([p], 0.1) | p.grad.mul_(0.1)
p.grad = p.grad.clamp(-0.1, 0.1) | p.grad = torch.ones(p.shape) | nn.init.ones_(p)
nn.init.constant_(p, 0.1) | nn.init.eye_(p) | p.copy_(p.sort(0).values) | p.chunk(2)[0].zero_()
p.scatter_(0, rows, 1.0) | p.triu_() | p.index_copy_(0, rows[0, :1], torch.ones(1, 6))
p.index_add_(0, rows[0, :1], torch.ones(1, 6)) | p.copy_(p.flip(0)) | p.data[:, 0] = 2.0
p.mul_(0.9).add_(p.detach().clone(), alpha=0.1) | p.copy_(torch.where(p.abs() < 0.3, 0.0, p))
p.mul_((p.abs() > p.abs().median()).float()) | p.mul_((p.abs() >= p.abs().flatten().topk(5).values[-1]))
nn.init.orthogonal_(p) | nn.init.trunc_normal_(p) | nn.init.kaiming_normal_(p) | p.add_(torch.randn_like(p), alpha=0.1)
p.normal_() | p.uniform_(-1, 1) | torch.add(p, 1, out=p) | p.detach().mul_(3)
nn.utils.clip_grad_norm_([p, other], 0.1) | torch._foreach_add_([p, other], [p.grad, other.grad])
"""


def cells(table: str) -> list[str]:
    return [cell.strip() for line in table.strip().splitlines() for cell in line.split("|")]


def plain(value: Tensor, gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value)
    parameter.grad = gradient
    return parameter


def numbers(value: Any, full: Full) -> Tensor:
    """A result as one tensor of numbers, whatever it is made of."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return torch.cat([numbers(each, full).flatten() for each in value]) if value else torch.zeros(0)
    if isinstance(value, str):
        return torch.tensor([float(value)]).double()
    return torch.as_tensor(0.0 if value is None else full(value)).detach().double()


def differ(got: Any, expected: Any, full: Full) -> bool:
    got, expected = numbers(got, full), numbers(expected, full)
    return got.shape != expected.shape or not torch.allclose(got, expected, atol=1e-5, equal_nan=True)


def outcome(cell: str, writes: bool, make: Make, rows: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    p, other = make(torch.randn(rows, 6), torch.randn(rows, 6)), plain(torch.ones(3), torch.ones(3))
    names = {"p": p, "other": other, "torch": torch, "nn": nn, "F": F, "rows": torch.zeros(1, 6, dtype=torch.long)}
    with torch.set_grad_enabled(not writes):
        result = exec(cell, names) if writes else eval(cell, names)
    return p, p.grad, other, other.grad, result, torch.get_rng_state()


def faults_of_cells(make: Make, full: Full, rows: int = 8) -> dict[str, str]:
    """The cells in which a parameter is not like a plain one, and why."""
    faults = {}
    for cell, writes in [*((cell, False) for cell in cells(READS)), *((cell, True) for cell in cells(WRITES))]:
        expected = outcome(cell, writes, plain, rows)
        try:
            pairs = zip(outcome(cell, writes, make, rows), expected, strict=True)
            wrong = [number for number, pair in enumerate(pairs) if differ(*pair, full)]
        except Exception as error:
            wrong = [repr(error)[:120]]
        if wrong:
            faults[cell] = str(wrong)
    return faults


def net() -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5))
    made(torch.randint(0, 7, (4, 3))).pow(2).mean().backward()
    return made


def faults_of_uses(make: Callable[[], Any], uses: dict[str, Callable[[Any], Any]], full: Full) -> dict[str, str]:
    faults = {}
    for name, use in uses.items():
        expected_net, got_net = net(), make()
        torch.manual_seed(5)
        expected = use(expected_net)
        torch.manual_seed(5)
        try:
            pairs = [(use(got_net), expected)]
            for got, one in zip(got_net.parameters(), expected_net.parameters(), strict=True):
                pairs += [(got, one), (got.grad, one.grad)]
            wrong = [number for number, pair in enumerate(pairs) if differ(*pair, full)]
        except Exception as error:
            wrong = [f"{error!r}"]
        if wrong:
            faults[name] = str(wrong)
    return faults


def averaged(net: Any, **options: Any) -> Any:
    average = AveragedModel(net, **options)
    with torch.no_grad():
        for _ in range(3):
            for parameter in net.parameters():
                parameter.mul_(1.1)
            average.update_parameters(net)
    return [*average.module.parameters(), average(torch.tensor([[0, 3, 6]]))]


@torch.no_grad()
def noise(net: Any) -> None:
    for parameter in net.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.01)
        parameter.add_(torch.randn(parameter.shape) * 0.01)


@torch.no_grad()
def sharpness_aware(net: Any) -> Any:
    scale = 0.05 / (torch.stack([p.grad.norm() for p in net.parameters()]).norm() + 1e-12)
    for parameter in net.parameters():
        parameter.add_(parameter.grad * scale)
    return scale


@torch.no_grad()
def branches(net: Any) -> Any:
    for parameter in net.parameters():
        if parameter.abs().max() > 0.5:
            parameter.mul_(0.5)
    return sum(bool(parameter.isnan().any()) for parameter in net.parameters())


def accumulated(net: Any) -> Any:
    total = torch.zeros(())
    for parameter in net.parameters():
        total.add_(parameter.detach().pow(2).sum())
    return total


def printed(net: Any) -> Any:
    text = f"{sum(p.norm().item() for p in net.parameters()):.4f}"
    values = net[3].weight.tolist(), net[0].weight.detach().cpu().numpy().mean()
    return len(text), values, [p.shape[0] for p in net.parameters()], net[3].weight.device.type == "cpu"


def penalty(net: Any) -> Any:
    parameters = list(net.parameters())
    return list(torch.autograd.grad(sum(p.square().sum() + p.norm() + p[0].sum() for p in parameters), parameters))


def saved(net: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    return list(torch.load(buffer).values())


def trained(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., Any]:
    def train(net: Any) -> Any:
        optimizer = make([parameter for parameter in net.parameters() if parameter.dim() == 2])
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.tensor([[0, 3, 6]])).pow(2).mean().backward()
            optimizer.step()

    return train


USES: dict[str, Callable[[Any], Any]] = {
    "grad_norm": lambda net: grad_norm(net, 2),
    "clip_grad_norm_": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
    "get_total_norm": lambda net: nn.utils.get_total_norm([p.grad for p in net.parameters()]),
    "average": averaged,
    "average by function": lambda net: averaged(net, avg_fn=get_ema_avg_fn(0.9)),
    "reset_parameters": lambda net: [net[index].reset_parameters() for index in (0, 1, 3)],
    "noise": noise,
    "SAM's first step": sharpness_aware,
    "branches on values": branches,
    "own accumulator": accumulated,
    "printed": printed,
    "backward of a penalty": lambda net: net[3].weight.square().sum().backward(),
    "state_dict": saved,
    "load_state_dict": lambda net: (
        net.load_state_dict({k: torch.ones(v.shape) for k, v in net.state_dict().items()}) and None
    ),
    "zero_grad": lambda net: net.zero_grad(set_to_none=False),
    "zero_grad to None": lambda net: [net.zero_grad(), [p.grad is None for p in net.parameters()]][1],
    "deepcopy": lambda net: [p.norm() for p in copy.deepcopy(net).parameters()],
    "frozen": lambda net: [net[0].requires_grad_(False), [p.requires_grad for p in net.parameters()]][1],
    "types": lambda net: [isinstance(p, nn.Parameter) and p.is_leaf for p in net.parameters()],
}
OF_SHARDS: dict[str, Callable[[Any], Any]] = {
    "penalty": penalty,
    "average at once": lambda net: averaged(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "prune": lambda net: nn.utils.prune.l1_unstructured(net[1], "weight", 0.3).weight,
    "SGD": trained(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "AdamW at once": trained(lambda p: torch.optim.AdamW(p, 0.1, foreach=True)),
    "AdamW fused": trained(lambda p: torch.optim.AdamW(p, 0.1, fused=True)),
    "Adafactor": trained(lambda p: torch.optim.Adafactor(p, 0.1)),
}
