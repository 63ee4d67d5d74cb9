"""Padding to the longest part, where a stage of a pipeline computes with shapes only."""

from __future__ import annotations

import torch

from lightning_parallel.collectives.by_elements import _with_zeros
from lightning_parallel.techniques.observed.shapes import ShapesOnly


def test_what_has_a_shape_only_has_none_but_that_when_it_is_padded() -> None:
    weight = torch.ones(2, 3)
    with ShapesOnly([weight], torch.device("cpu")):
        rows = weight * 2
        assert rows.is_meta
        padded = _with_zeros(rows, 1)
    assert padded.is_meta  # else this rank alone would send it
    assert padded.shape == (3, 3)
    assert _with_zeros(weight, 1).tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
