from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import PipelineParallel
from lightning_parallel.techniques.tools.microbatches import (
    SAMPLES,
    SEVERAL,
    WHOLE,
    again,
    layout_of,
    lengths_in,
    samples_in,
    split,
)


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
    assert layout == {
        **dict.fromkeys(("images", "targets", "tokens", "arrays"), SAMPLES),
        "pair": (SAMPLES, {"names": SAMPLES}),
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
    assert layout == {"y": SAMPLES, "x": SEVERAL, "times": SEVERAL}
    batch = graphs([0, 1, 2])
    assert split(batch, 1, layout) == [batch]
    with pytest.raises(ValueError, match=r"batch\['x'\], batch\['times'\]: nothing tells .*; collate samples so that"):
        split(batch, 3, layout)


def test_what_other_batches_have_otherwise_is_found_by_its_name_and_size():
    def collate(numbers: list[int]) -> dict[str, Any]:
        return {"x": torch.tensor(numbers), "mask": torch.eye(4), "weights": None}

    layout = seen(collate, 4)
    later = {"more": torch.arange(4), "weights": torch.ones(4), "mask": torch.eye(4), "x": torch.arange(4)}
    part = split(later, 2, layout)[1]
    assert (part["x"].tolist(), part["more"].tolist(), part["weights"].shape, part["mask"].shape) == (
        *([2, 3], [2, 3], (2,)),
        (4, 4),
    )


def test_values_one_after_the_other_of_which_a_sample_has_none_are_not_whole():
    def collate(numbers: list[int]) -> dict[str, Any]:
        return {"x": torch.tensor(numbers), "values": torch.cat([torch.ones(number % 3) for number in numbers])}

    assert seen(collate, 4) == {"x": SAMPLES, "values": SEVERAL}


def test_samples_that_are_left_out_or_come_twice_leave_rows_all_the_same():
    def chosen(numbers: list[int]) -> list[Any]:
        kept = [number for number in numbers if number % 3]
        return [torch.tensor(kept), {"names": list(map(str, kept))}]

    def twice(numbers: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(numbers * 2), torch.eye(3)

    assert seen(chosen, 6) == (SAMPLES, {"names": SAMPLES})
    assert seen(twice, 6) == (SAMPLES, WHOLE)


def test_keys_in_another_order_and_keys_that_are_there_at_times():
    def collate(numbers: list[int]) -> dict[str, Any]:
        first = {"x": torch.tensor(numbers), "mask": torch.eye(4), **({"rare": torch.ones(2)} if 0 in numbers else {})}
        return first if 0 in numbers else dict(reversed(first.items()))

    assert seen(collate, 4) == {"x": SAMPLES, "mask": WHOLE, "rare": None}


def test_what_a_later_batch_lacks_or_has_without_rows_is_not_divided():
    def collate(numbers: list[int]) -> dict[str, Any]:
        return {"x": torch.tensor(numbers), "mask": torch.ones(len(numbers)), "names": list(map(str, numbers))}

    layout = seen(collate, 4)
    for mask, names in ((None, None), (torch.tensor(1.0), 3), (0.5, "four")):
        later = {"mask": mask, "names": names, "x": torch.arange(4)}
        assert (samples_in(later, layout), *lengths_in(later, layout)) == (4, 4)
        first, second = split(later, 2, layout)
        assert (second["mask"], second["names"], second["x"].tolist()) == (mask, names, [2, 3])
        assert (first["mask"], first["names"]) == (mask, names)
