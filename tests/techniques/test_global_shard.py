"""Operations on shards that compute as the whole, each against the whole tensor; and what libraries do with them."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_parallel.techniques.tools.global_shard import GlobalShard, global_of, whole_of
from lightning_parallel.techniques.tools.shards import ElementsShard, dtensor_of, shard_of
from tests.ranks import ranks, run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")

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
sum(float(row.sum()) for row in p) | len(p) | f"{p.norm():.4f}"
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


def cut(tensor: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Cut `dim`; on two axes as ZeRO 3 over tensor parallel does: over `tp`, and then the rows over `dp`."""
    if mesh.ndim == 1:
        return distribute_tensor(tensor, mesh, [Shard(dim)])
    module = nn.Module()
    module.p = nn.Parameter(distribute_tensor(tensor, mesh["tp"], [Shard(dim)]))
    fully_shard(module, mesh=mesh["dp"])
    return module.p.detach()


def full(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (whole_of(value.detach()) if isinstance(value, DTensor) else value.detach()).double()
    return value


def same(got: Any, expected: Any) -> bool:
    got, expected = full(got), full(expected)
    if isinstance(expected, Tensor):
        close = isinstance(got, Tensor) and got.shape == expected.shape
        return close and torch.allclose(got, expected, atol=1e-5, equal_nan=True)
    return bool(got == expected or abs(got - expected) < 1e-5)


def computed(cell: str, writes: bool, cut_as: Callable[[Tensor], DTensor] | None, rows: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    value, gradient = torch.randn(rows, 6), torch.randn(rows, 6)
    p = nn.Parameter(value if cut_as is None else cut_as(value))
    p.grad = gradient if cut_as is None else cut_as(gradient)
    global_of(p)
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    names = {"p": p, "other": other, "torch": torch, "nn": nn, "F": F, "rows": torch.zeros(1, 6, dtype=torch.long)}
    result = None
    with torch.set_grad_enabled(not writes):
        if writes:
            exec(cell, names)
        else:
            result = eval(cell, names)
    return p, p.grad, other, other.grad, result


def wrong_cells(mesh: DeviceMesh, rows: int, dim: int) -> list[str]:
    found: list[str] = []
    for table, writes in ((READS, False), (WRITES, True)):
        for cell in cells(table):
            expected = computed(cell, writes, None, rows)
            try:
                got = computed(cell, writes, lambda tensor: cut(tensor, mesh, dim), rows)
                fault = "" if all(map(same, got, expected)) else "another value"
            except Exception as error:
                fault = repr(error)[:120]
            faults: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(faults, fault)
            found += [f"{cell}: {faults}"] if any(faults) else []
    return found


def on_two(rows: int, dim: int) -> list[str]:
    return wrong_cells(init_device_mesh("cpu", (2,)), rows, dim)


def on_four(rows: int, dim: int) -> list[str]:
    return wrong_cells(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), rows, dim)


@pytest.mark.parametrize(("rows", "dim"), [pytest.param(8, 0, marks=pytest.mark.exhaustive), (5, 0), (8, 1)])
def test_operations_on_two_ranks(rows: int, dim: int) -> None:
    assert run_on_ranks(2, on_two, rows, dim)[0] == []


@pytest.mark.parametrize(("rows", "dim"), [pytest.param(8, 0, marks=pytest.mark.exhaustive), (8, 1)])
def test_operations_under_zero_3_over_tensor_parallel(rows: int, dim: int) -> None:
    assert run_on_ranks(4, on_four, rows, dim)[0] == []


@ranks(2)
def test_ranks_without_elements_and_elements_in_pieces() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    pieces = ElementsShard(0, [((0, 1), (2, 3)), ((1, 2), (3, 4))])
    like = dtensor_of(torch.empty(0), mesh, [pieces], whole.shape, whole.stride())
    for value, shard in (
        (whole, shard_of(whole, like)),
        (whole[:1], distribute_tensor(whole[:1].clone(), mesh, [Shard(0)])),
    ):
        p: Any = global_of(nn.Parameter(shard))
        for read in ("sum", "mean", "max", "min", "norm", "prod", "abs", "std"):
            assert same(getattr(p, read)(), getattr(value, read)()), read
        assert torch.equal(p[-1], value[-1])
        with torch.no_grad():
            p[0] = 3.0
        assert whole_of(p.detach())[0].tolist() == [3.0] * 3


@ranks(2)
def test_view_writes_through_and_raises_once_stale() -> None:
    mesh = init_device_mesh("cpu", (2,))
    p: Any = global_of(nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])))
    with torch.no_grad():
        row, numbers = p[3], p.detach().numpy()
        row.mul_(5.0)
        assert p.sum() == 16.0
        p.mul_(2.0)
    with pytest.raises(RuntimeError, match="after the tensor has changed"):
        row.sum()
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 1
    with pytest.raises(RuntimeError, match=r"\.data = a tensor of shape \(3,\)"):
        p.data = torch.ones(3)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        p[0] = 1.0
    assert "ones" not in repr(p)
    assert type(copy.deepcopy(p)) is GlobalShard
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    assert torch.load(buffer)[3].tolist() == [10.0, 10.0]


# ---------------------------------------------------------------- helpers and libraries


def nets(mesh: DeviceMesh | None) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5))
    inputs = torch.randint(0, 7, (4, 3))
    if mesh is not None:
        for module in net.modules():
            for name, parameter in list(module._parameters.items()):
                module._parameters[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        for parameter in net.parameters():
            global_of(parameter)
    net(inputs).pow(2).mean().backward()
    return net, inputs


def averaged(net: Any, inputs: Tensor, **options: Any) -> Any:
    average = AveragedModel(net, **options)
    with torch.no_grad():
        for _ in range(3):
            torch._foreach_mul_(list(net.parameters()), 1.1)
            average.update_parameters(net)
    kinds = {type(parameter) for parameter in average.module.parameters()}
    assert kinds <= ({GlobalShard} if isinstance(net[0].weight, DTensor) else {nn.Parameter})
    return [*average.module.parameters(), average(inputs)]


def trained(make: Callable[..., torch.optim.Optimizer]) -> Callable[..., Any]:
    def train(net: Any, inputs: Tensor) -> Any:
        optimizer = make([parameter for parameter in net.parameters() if parameter.dim() == 2])
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs).pow(2).mean().backward()
            optimizer.step()

    return train


def sharpness(net: Any, inputs: Tensor) -> Any:
    with torch.no_grad():
        scale = 0.05 / (torch.stack([p.grad.norm() for p in net.parameters()]).norm() + 1e-12)
        for parameter in net.parameters():
            parameter.add_(parameter.grad * scale)
    return scale


def penalty(net: Any, inputs: Tensor) -> Any:
    parameters = list(net.parameters())
    return list(torch.autograd.grad(sum(p.square().sum() + p.norm() + p[0].sum() for p in parameters), parameters))


def saved(net: Any, inputs: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    return list(torch.load(buffer).values())


def reset(net: Any, inputs: Tensor) -> None:
    torch.manual_seed(3)
    for index in (0, 1, 3):
        net[index].reset_parameters()


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad_norm": lambda net, x: list(grad_norm(net, 2).values()),
    "clip_grad_norm_": lambda net, x: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
    "get_total_norm": lambda net, x: nn.utils.get_total_norm([p.grad for p in net.parameters()]),
    "average": averaged,
    "average by function": lambda net, x: averaged(net, x, avg_fn=get_ema_avg_fn(0.9)),
    "average at once": lambda net, x: averaged(net, x, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "deepcopy": lambda net, x: [p.norm() for p in copy.deepcopy(net).parameters()],
    "penalty": penalty,
    "saved": saved,
    "load_state_dict": lambda net, x: (
        net.load_state_dict({k: torch.ones(v.shape) for k, v in net.state_dict().items()}) and None
    ),
    "reset_parameters": reset,
    "sharpness": sharpness,
    "parameters_to_vector": lambda net, x: nn.utils.parameters_to_vector(net.parameters()),
    "prune": lambda net, x: nn.utils.prune.l1_unstructured(net[1], "weight", 0.3).weight,
    "zero_grad": lambda net, x: net.zero_grad(),
    "SGD": trained(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "AdamW at once": trained(lambda p: torch.optim.AdamW(p, 0.1, foreach=True)),
    "AdamW one by one": trained(lambda p: torch.optim.AdamW(p, 0.1, foreach=False)),
    "AdamW fused": trained(lambda p: torch.optim.AdamW(p, 0.1, fused=True)),
    "Adafactor": trained(lambda p: torch.optim.Adafactor(p, 0.1)),
    "RMSprop": trained(lambda p: torch.optim.RMSprop(p, 0.01)),
}


@ranks(2)
def test_libraries_find_what_one_process_has() -> None:
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    for name, use in USES.items():
        expected_net, inputs = nets(None)
        net, _ = nets(mesh)
        expected, got = use(expected_net, inputs), use(net, inputs)
        values = ([v] if isinstance(v, Tensor) else v or [] for v in (got, expected))
        pairs = [*zip(net.parameters(), expected_net.parameters(), strict=True), *zip(*values, strict=True)]
        wrong += [] if all(same(*pair) for pair in pairs) else [name]
    assert wrong == []
