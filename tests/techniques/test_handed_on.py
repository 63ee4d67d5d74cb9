"""What stages hand on must follow from the batch's shapes: the next stage waits for the same every time."""

from typing import Any, cast

import pytest
import torch

from lightning_parallel.techniques.pipeline_parallel.exchange import Exchange


class Sent:
    """A lane that only notes what is sent."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.tensors: list[Any] = []

    def send_object(self, value: Any, to: int, tag: int) -> None:
        self.objects.append(value)

    def send(self, tensor: Any, to: int, tag: int) -> None:
        self.tensors.append(tensor)


def test_a_structure_is_sent_once() -> None:
    lane = Sent()
    exchange = Exchange(cast(Any, lane), lambda stage: stage, 2)
    for microbatch in range(3):
        exchange.send_forward(0, microbatch, "shapes", {"hidden": torch.rand(2, 3), "length": 3})
    assert (len(lane.objects), len(lane.tensors)) == (1, 3)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"hidden": torch.zeros(2, 3), "length": 4}, "4"),
        ({"hidden": torch.zeros(2, 4), "length": 3}, "4"),
        ({"hidden": torch.zeros(2, 3)}, "length"),
    ],
)
def test_another_value_is_told_by_what_changed(value: Any, said: str) -> None:
    exchange = Exchange(cast(Any, Sent()), lambda stage: stage, 2)
    exchange.send_forward(0, 0, "shapes", {"hidden": torch.zeros(2, 3), "length": 3})
    with pytest.raises(ValueError, match=r"what stage 0 hands on differs .* return as tensors what varies") as refused:
        exchange.send_forward(0, 1, "shapes", value)
    assert said in str(refused.value).partition("same shapes: ")[2].partition(";")[0]
