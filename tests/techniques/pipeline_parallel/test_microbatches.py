from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_parallel import ParallelPlan, PipelineParallel
from lightning_parallel.techniques.tools.microbatches import samples_in, select, split


def test_parts_share_memory_and_gradients_with_the_batch():
    """Models replace -100 in the labels they are given in place."""
    batch = {"ids": torch.tensor([[1, -1], [2, -1]])}
    table, losses = nn.Embedding(4, 3), []
    for part in split(batch, 2):
        part["ids"].masked_fill_(part["ids"] == -1, 0)
        losses.append(table(part["ids"]).sum())
    for loss in losses:
        loss.backward()
    assert table.weight.grad[:, 0].tolist() == [2, 1, 1, 0]
    assert batch["ids"].tolist() == [[1, 0], [2, 0]]  # as the model would have left the batch of one process
    whole = torch.ones(4, requires_grad=True)
    sum(part.sum() * factor for factor, part in enumerate(split(whole, 2))).backward()
    assert whole.grad.tolist() == [0, 0, 1, 1]


def test_batch_that_is_too_small_for_a_pipeline_warns(caplog):
    assert PipelineParallel(4)._count(4, 1) == 1
    assert "A batch of 1 gives 1 microbatches to 4 ranks of a pipeline, which mostly wait" in caplog.text


def collated(numbers: list[int]) -> dict[str, Any]:
    """Pictures with three channels, targets with boxes, and what belongs to the batch."""
    images = [torch.full((3, 2, 2), float(number)) for number in numbers]
    return {
        "images": images,
        "targets": tuple({"boxes": torch.zeros(3, 4), "name": str(number)} for number in numbers),
        "tokens": torch.zeros(len(numbers), 7),
        "arrays": np.array(numbers),
        "pair": [torch.tensor(numbers), {"names": list(map(str, numbers))}],
        "classes": ["cat", "dog"],
        "longest": 7,
        "weight": torch.tensor(2.0),
        "nothing": None,
    }


def test_split_divides_samples_and_copies_scalars():
    batch = collated([0, 1, 2, 3])
    first, second = split(batch, 2)
    assert [float(image[0, 0, 0]) for image in second["images"]] == [2, 3]
    assert [target["name"] for target in first["targets"]] == ["0", "1"]
    assert (second["tokens"].shape, second["arrays"].tolist()) == ((2, 7), [2, 3])
    assert (second["pair"][0].tolist(), second["pair"][1]["names"]) == ([2, 3], ["2", "3"])
    assert (second["classes"], second["longest"], float(second["weight"])) == (["cat", "dog"], 7, 2.0)
    assert split(batch, 1) == [batch]
    found = select(batch, [slice(0, 1), slice(2, 4)])
    assert (found["arrays"].tolist(), found["pair"][1]["names"]) == ([0, 2, 3], ["0", "2", "3"])
    assert found["tokens"].shape == (3, 7)
    assert [target["name"] for target in found["targets"]] == ["0", "2", "3"]
    images, targets = [torch.zeros(3, 4, 4)] * 5, [{"boxes": torch.zeros(number, 4)} for number in range(5)]
    assert samples_in((images, targets)) == 5
    assert [len(part[1]) for part in split((images, targets), 2)] == [3, 2]


@pytest.mark.parametrize(
    ("value", "named", "kept"),
    [
        (torch.zeros(9, 4), {"other": 1}, (9, 2)),
        (torch.zeros(9, 4), {"other": None}, (9, 4)),
        (np.zeros((9, 4)), {"other": 1}, (9, 2)),
    ],
)
def test_tensor_of_another_length_needs_a_plan(value: Any, named: dict[str, Any], kept: Any) -> None:
    batch = {"x": torch.zeros(4), "other": value}
    with pytest.raises(
        ValueError, match=r"batch\['other'\] is a tensor of shape \(9, 4\) in a batch of 4 .*batch_dims="
    ):
        split(batch, 2)
    assert split(batch, 2, named)[0]["other"].shape == kept


def test_plan_names_nested_tensors():
    nested = {"x": torch.zeros(4), "graphs": [{"edges": torch.zeros(2, 11)}, [torch.zeros(3), 1]]}
    with pytest.raises(ValueError, match=r"batch\['graphs.0.edges'\]"):
        split(nested, 2)
    part = split(nested, 2, {"graphs": None})[1]
    assert part["graphs"] is nested["graphs"]
    alone = [{"x": torch.zeros(7)}, {"x": torch.zeros(5)}]
    assert [len(part) for part in split(alone, 2, {"": 0})] == [1, 1]
    for wrong in ({"x": -1}, {"x": "1"}, ["x"]):
        with pytest.raises(ValueError, match="batch_dims maps paths"):
            ParallelPlan(batch_dims=wrong)
