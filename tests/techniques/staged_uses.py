"""What helpers and libraries do with all parameters and gradients of a model between steps."""

import copy

import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn


def _ema_by_hand(net):
    average = {name: p.detach().clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        for _ in range(2):
            for name, p in net.named_parameters():
                p.mul_(0.9)
                average[name].mul_(0.9).add_(p, alpha=0.1)
    return [float(value.sum()) for value in average.values()]


def _averaged_model(net):
    averaged = AveragedModel(net, avg_fn=get_ema_avg_fn(0.9))
    with torch.no_grad():
        for _ in range(3):
            for p in net.parameters():
                p.mul_(1.1)
            averaged.update_parameters(net)
    return [float(p.detach().norm()) for p in averaged.module.parameters()]


def _averaged_forward(net):
    averaged = AveragedModel(net, avg_fn=get_ema_avg_fn(0.9))
    return averaged(torch.tensor([[0, 3, 6]]))


def _rows_through_views(net):
    with torch.no_grad():
        weight = net[0].weight
        weight[0].zero_()
        row = weight[1]
        row.add_(1.0)
        weight[2, 3] = 7.0
        weight[[4, 5]] = 0.5
        net[3].weight.data[:, 0] = 2.0
    return net[0].weight.sum(), net[3].weight.sum()


def _kept_view(net):
    row = net[0].weight[0]
    with torch.no_grad():
        net[0].weight.mul_(2.0)
    return row.sum()


def _wgan_clamp(net):
    with torch.no_grad():
        for p in net.parameters():
            p.clamp_(-0.05, 0.05)
    return max(p.abs().max().item() for p in net.parameters())


def _reset(net):
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _noise_like(net):
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p), alpha=0.01)


def _noise_of_shape(net):
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape) * 0.01)


def _sharpness_aware(net):
    with torch.no_grad():
        scale = 0.05 / (torch.stack([p.grad.norm() for p in net.parameters()]).norm() + 1e-12)
        for p in net.parameters():
            p.add_(p.grad * scale)
    return scale


def _copied_between_stages(net):
    with torch.no_grad():
        net[3].weight[:, :6].copy_(net[0].weight[:5])
        net[0].weight[0] = net[3].bias.mean()
    return net[3].weight.norm()


def _branches(net):
    with torch.no_grad():
        for p in net.parameters():
            if p.abs().max() > 0.5:
                p.mul_(0.5)
    return sum(bool(p.isnan().any()) for p in net.parameters())


def _own_accumulator(net):
    total = torch.zeros(())
    for p in net.parameters():
        total.add_(p.detach().pow(2).sum())
    return [total, *(torch.histc(p.detach(), 5) for p in net.parameters())]


def _printed(net):
    text = f"{sum(float(p.norm()) for p in net.parameters()):.4f}"
    return (
        len(text),
        net[3].weight.tolist(),
        net[0].weight.detach().cpu().numpy().mean(),
        [p.shape[0] for p in net.parameters()],
    )


def _vector_to(net):
    vector = torch.arange(sum(p.numel() for p in net.parameters())) / 100
    nn.utils.vector_to_parameters(vector, net.parameters())


def _regularized_backward(net):
    net[3].weight.square().sum().backward()


def _frozen(net):
    net[0].requires_grad_(False)
    return [p.requires_grad for p in net.parameters()]


def _by_type(net):
    return [isinstance(p, nn.Parameter) and p.is_leaf and p.device.type == "cpu" for p in net.parameters()]


USES = {
    "lightning grad_norm": lambda net: grad_norm(net, 2),
    "clip_grad_norm_": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1),
    "clip_grad_value_": lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.01),
    "get_total_norm": lambda net: nn.utils.get_total_norm([p.grad for p in net.parameters()]),
    "EMA by hand": _ema_by_hand,
    "AveragedModel": _averaged_model,
    "AveragedModel's forward": _averaged_forward,
    "forward": lambda net: net(torch.tensor([[0, 3, 6]])),
    "rows written through views": _rows_through_views,
    "a view kept over a change": _kept_view,
    "WGAN's clamp": _wgan_clamp,
    "reset_parameters": _reset,
    "spectral norms": lambda net: [torch.linalg.svdvals(p.detach())[0] for p in net.parameters() if p.dim() == 2],
    "noise like": _noise_like,
    "noise of a shape": _noise_of_shape,
    "SAM's first step": _sharpness_aware,
    "weights copied between stages": _copied_between_stages,
    "branches on values": _branches,
    "own accumulator and histograms": _own_accumulator,
    "printed": _printed,
    "parameters_to_vector": lambda net: nn.utils.parameters_to_vector(net.parameters()),
    "vector_to_parameters": _vector_to,
    "trunc_normal_": lambda net: nn.init.trunc_normal_(net[1].weight),
    "orthogonal_": lambda net: nn.init.orthogonal_(net[3].weight),
    "kaiming_normal_": lambda net: nn.init.kaiming_normal_(net[3].weight),
    "kthvalue": lambda net: [p.detach().flatten().kthvalue(2).values for p in net.parameters()],
    "state_dict": lambda net: list(net.state_dict().values()),
    "zero_grad": lambda net: net.zero_grad(set_to_none=False),
    "zero_grad to None": lambda net: [net.zero_grad(), [p.grad is None for p in net.parameters()]][1],
    "a gradient set": lambda net: setattr(net[3].weight, "grad", net[3].weight.grad * 2),
    "deepcopy": lambda net: [p.norm() for p in copy.deepcopy(net).parameters()],
    "nonzero": lambda net: (net[3].weight > 0).nonzero().sum(),
    "mask": lambda net: net[0].weight[net[0].weight > 0].sum(),
    "sum over stages": lambda net: float(sum(p.detach().sum() for p in net.parameters())),
    "backward of a penalty": _regularized_backward,
    "frozen": _frozen,
    "types": _by_type,
}
