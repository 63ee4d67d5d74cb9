"""What stages send each other: the structure once, and by its number where it may vary; else it must stay the same."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy
from lightning_parallel.techniques.pipeline_parallel.p2p import P2P, packed
from tests.strategies.one_and_two import assert_like_one_device, made
from tests.trainers import trainer


class Sent:
    """A channel that only notes what is sent."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.tensors: list[Any] = []

    def send_object(self, value: Any, to: int, tag: int) -> None:
        self.objects.append(value)

    def send(self, tensor: Any, to: int, tag: int) -> None:
        self.tensors.append(tensor)


def test_structures_are_sent_once_each() -> None:
    hidden, maps = torch.rand(2, 3), torch.rand(4)
    for values, varies, objects, expected in (
        ([{"hidden": hidden, "length": 3}] * 3, False, 1, []),
        ([(hidden,), (hidden, maps), (hidden,), (hidden, maps)], True, 2, [0, 0, 1, 2]),
    ):
        channel = Sent()
        p2p = P2P(cast(Any, channel), lambda stage: stage, 2)
        for microbatch, value in enumerate(values):
            p2p.send_forward(0, microbatch, "shapes", packed(value), varies=varies)
        numbers = [tensor.item() for tensor in channel.tensors if tensor.dtype is torch.long]
        assert (len(channel.objects), numbers) == (objects, expected)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"hidden": torch.zeros(2, 3), "length": 4}, "4"),
        ({"hidden": torch.zeros(2, 4), "length": 3}, "4"),
        ({"hidden": torch.zeros(2, 3)}, "length"),
    ],
)
def test_another_value_is_told_by_what_changed(value: Any, said: str) -> None:
    p2p = P2P(cast(Any, Sent()), lambda stage: stage, 2)
    p2p.send_forward(0, 0, "shapes", packed({"hidden": torch.zeros(2, 3), "length": 3}), varies=False)
    with pytest.raises(ValueError, match=r"stage 0 returned .* Return what varies as tensors") as refused:
        p2p.send_forward(0, 1, "shapes", packed(value), varies=False)
    assert said in str(refused.value).partition(";")[0]


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, more: bool) -> tuple[Tensor, ...]:
        hidden = self.inner(x).relu()
        return (x + hidden, hidden) if more else (x + hidden,)


class LooksAtMaps(LightningModule):
    """Asks blocks for their hidden values in the first batch of each validation, as one does for attention maps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Looked() for _ in range(4))

    def loss(self, x: Tensor, more: bool) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x, *hidden = block(x, more)
        return self.head(x + sum(hidden)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, False)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(batch, batch_idx % 2 == 0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def validated(strategy: Any) -> float:
    data = DataLoader(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)), 8)
    run = trainer(made(strategy), max_epochs=2)
    run.fit(LooksAtMaps(), data, data)
    return float(run.callback_metrics["loss"])


def test_block_may_return_more_in_some_batches_of_evaluation() -> None:
    assert_like_one_device(validated, 2, (None,), (partial(PipelineParallelStrategy, 2, microbatches=2),))
