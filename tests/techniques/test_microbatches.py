from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import PipelineParallel
from lightning_parallel.techniques.tools.microbatches import SAMPLES, SEVERAL, WHOLE, again, layout_of, split


def test_a_step_may_change_its_samples_in_place_before_the_last_one_went_backward():
    """As models do that replace -100 in the labels they are given."""
    batch = {"ids": torch.tensor([[1, -1], [2, -1]])}
    table = nn.Embedding(4, 3)
    losses = []
    for part in split(batch, 2):
        part["ids"].masked_fill_(part["ids"] == -1, 0)
        losses.append(table(part["ids"]).sum())
    for loss in losses:
        loss.backward()
    assert table.weight.grad[:, 0].tolist() == [2, 1, 1, 0]
    assert batch["ids"].tolist() == [[1, 0], [2, 0]]  # as the model would have left the batch of one process


def test_what_learns_is_reached_through_a_part():
    whole = torch.ones(4, requires_grad=True)
    sum(part.sum() * factor for factor, part in enumerate(split(whole, 2))).backward()
    assert whole.grad.tolist() == [0, 0, 1, 1]


def test_a_batch_that_is_too_small_for_a_pipeline_is_told(caplog):
    assert PipelineParallel(4)._count(4, 1) == 1
    assert "A batch of 1 gives 1 microbatches to 4 ranks of a pipeline, which mostly wait" in caplog.text


def collated(numbers: list[int]) -> dict[str, Any]:
    """Pictures with as many boxes each as channels, a padded text, and what belongs to the batch."""
    images = [torch.full((3, 2, 2), float(number)) for number in numbers]
    lengths = [number + 2 for number in numbers]
    return {
        "images": images,
        "targets": tuple({"boxes": torch.zeros(3, 4), "name": str(number)} for number in numbers),
        "tokens": torch.zeros(len(numbers), max(lengths)),
        "arrays": np.array(numbers),
        "pair": [torch.tensor(numbers), {"names": list(map(str, numbers))}],
        "positions": torch.arange(max(lengths)),
        "longest": max(lengths),
        "mask": torch.ones(3, 3),
    }


def seen(collate: Any, size: int = 3) -> Any:
    numbers = list(range(size))
    return layout_of(collate(numbers), [collate([n for n in numbers if n != out]) for out in numbers], size)


def test_where_samples_are_is_seen_and_not_guessed_from_sizes():
    """Three samples of three channels and three boxes, beside a mask of 3 x 3."""
    batch, layout = collated([0, 1, 2]), seen(collated)
    assert dict(zip(batch, layout, strict=True)) == {
        **dict.fromkeys(("images", "targets", "tokens", "arrays"), SAMPLES),
        "pair": (SAMPLES, (SAMPLES,)),
        **dict.fromkeys(("positions", "longest", "mask"), WHOLE),
    }
    two, one = split(batch, 2, layout)
    assert [float(image[0, 0, 0]) for image in two["images"]] == [0, 1]
    assert [target["name"] for target in one["targets"]] == ["2"]
    assert (one["tokens"].shape, one["positions"].shape, one["mask"].shape) == ((1, 4), (4,), (3, 3))
    assert (one["arrays"].tolist(), one["pair"][0].tolist(), one["pair"][1]["names"]) == ([2], [2], ["2"])
    twice = again(one, layout)
    assert (len(twice["images"]), twice["arrays"].tolist(), twice["mask"].shape) == (2, [2, 2], (3, 3))


def graphs(numbers: list[int]) -> dict[str, Tensor]:
    nodes = [number + 1 for number in numbers]
    return {"y": torch.tensor(numbers), "x": torch.zeros(sum(nodes), 2), "times": torch.zeros(5, len(numbers))}


def test_what_is_made_of_several_samples_is_not_divided():
    layout = seen(graphs)
    assert layout == (SAMPLES, SEVERAL, SEVERAL)
    batch = graphs([0, 1, 2])
    assert split(batch, 1, layout) == [batch]
    with pytest.raises(ValueError, match=r"batch\['x'\], batch\['times'\]: nothing tells .*; collate samples so that"):
        split(batch, 3, layout)
