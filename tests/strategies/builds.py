"""What tests of builds compare: all tensors of a module, from one seed."""

import random
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


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
        assert tensor.dtype == other.dtype, name
        assert tensor.stride() == other.stride(), name
        assert torch.equal(tensor, other), name
