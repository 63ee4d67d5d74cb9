"""Maps and embeddings that stand alone, and rows of divided weights that are changed later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import TensorParallelStrategy
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Divided
from tests.models import points
from tests.ranks import ranks
from tests.strategies.one_and_two import assert_like_one_device
from tests.trainers import trainer


class Alone(LightningModule):
    """A linear map, or an embedding, alone: no pair of maps leads into features and out of them."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.table, self.seen, self.head = nn.Embedding(7, 6), nn.Conv1d(1, 3, 3), head

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.seen(batch[0][:, None, :8])
        x = self.head(x.flatten(1)).softmax(-1) + self.table(batch[0][:, :1].abs().long() % 7).sum((1, 2))[:, None]
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


MODULES: dict[str, tuple[Callable[[], LightningModule], Any]] = {
    "alone": (lambda: Alone(nn.Linear(18, 5)), None),
    "embedding alone": (lambda: Alone(nn.Identity()), None),
}


def trained(strategy: Any) -> list[dict[str, Tensor]]:
    found = []
    for make, plan in MODULES.values():
        torch.manual_seed(0)
        module = make()
        fit = trainer("auto" if strategy is None else strategy(2, plan=plan), max_epochs=1, limit_val_batches=0)
        fit.fit(module, DataLoader(points(16, seed=1), 4))
        found.append({name: tensor.detach().clone() for name, tensor in module.state_dict().items()})
    return found


def test_steps_do_with_parameters_what_they_do_on_one_device() -> None:
    assert_like_one_device(trained, 2, (None,), (TensorParallelStrategy,), rtol=1e-5)


@ranks(2)
def test_rows_that_are_changed_later_are_refused_or_keep() -> None:
    """Autograd has what was gathered: a change of the weight is an error while there is a view, and else none of it."""
    elements = Ranks(dist.group.WORLD, "tp").elements(6, [[(0, 3)], [(3, 6)]])
    for change in (
        lambda weight: weight.mul_(2),
        lambda weight: weight.detach().mul_(2),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight[1].mul_(2),
    ):
        weight = Divided(nn.Parameter(torch.ones(3, 4)), {0: elements})
        row = weight[1]
        loss = (row * torch.ones(4, requires_grad=True)).sum()
        with torch.no_grad():
            change(weight)
        with pytest.raises(RuntimeError, match=r"modified|but a view of its gathered copy exists"):
            (weight.sum() + loss).backward()
        elements.ranks.viewed.clear()
    weight = Divided(nn.Parameter(torch.ones(3, 4)), {0: elements})
    factor = torch.ones(4, requires_grad=True)
    loss = (weight[1] * factor).sum()
    weight.data = torch.zeros(6, 4)
    loss.backward()
    assert torch.equal(factor.grad, torch.ones(4))
