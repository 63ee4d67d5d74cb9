"""Models that tensor parallelism divides as they mean it, and those that it refuses or leaves whole."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any

import pytest

from lightning_parallel import ParallelPlan, TensorParallelStrategy
from tests.curves import Curve, compare, train
from tests.heard import heard
from tests.models import build, loaders
from tests.ranks import begun_on_one, run_on_ranks
from tests.techniques.parity import SHORT, TP2, WHOLE_SEQUENCE, adamw
from tests.tiers import sampled
from tests.trainers import trainer

TWO = {"num_hidden_layers": 2, "optimizer": adamw}
MAPS = {f"network.model.layers.*.mlp.{name}_proj": style for name, style in
        (("up", "colwise"), ("gate", "colwise"), ("down", "rowwise"))}  # fmt: skip
PLAN = ParallelPlan(blocks="network.model.layers.*", styles=MAPS)
ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "many uses": (WHOLE_SEQUENCE, {}),
    "between": (TP2, {"data": SHORT | {"length": 15}}),
    "recomputing": (TP2, {"data": SHORT | {"length": 15}}),
    "checkpointed": (TP2, {"model": TWO}),
    "llama": (partial(TensorParallelStrategy, 2, plan=PLAN), {"model": TWO}),
    "mixtral": (TP2, {"model": TWO | {"output_router_logits": True}}),
}
GATHERED = {
    "hard coded": (),
    "shifting": ("cat",),
    "encoding": (),
}
"""What ranks cannot divide they gather, exactly, and say it."""


def trained(column: str, strategy: Any, **options: Any) -> tuple[Curve, set[str]]:
    """The run, and the operations for which ranks say that they gather."""
    with heard(logging.INFO) as said:
        found = train(column, strategy, **({"max_epochs": 1, "data": SHORT} | options))
    lines = [line.split()[0] for line in "\n".join(said).splitlines() if re.search(r"\(\d.*\) +\d+ +[\d,]+$", line)]
    return found, set(lines)


def check(column: str, strategy: Any, **options: Any) -> list[set[str]]:
    expected = begun_on_one(trained, column, "auto", **options)
    found = run_on_ranks(2, trained, column, strategy, **options)
    for got, _ in found:
        compare(expected.result()[0], got)
    return [operations for _, operations in found]


@sampled(1, "column", ROWS)
def test_model_trains_as_in_one_process(column: str) -> None:
    strategy, options = ROWS[column]
    check(column, strategy, **options)


@sampled(1, "column", GATHERED)
def test_what_ranks_cannot_divide_is_gathered_and_said(column: str) -> None:
    assert set.union(*check(column, TP2)) == {*GATHERED[column]}


WRONG = ParallelPlan(blocks=PLAN.blocks, styles=dict.fromkeys(MAPS, "columnwise"))
REFUSED = [
    ("unknown", TP2, "finds nothing to divide in Unknown"),
    ("unknown", TP2, "styles={'net.layers.*.up': 'colwise'"),  # a plan to start from
    (
        "llama",
        partial(TensorParallelStrategy, 2, plan=WRONG),
        "the tensor style 'columnwise' is none of colwise, rowwise",
    ),
    ("out of bounds", TP2, "is out of bounds: there are 64 rows in the embedding"),
]


def refused() -> list[str]:
    """What a rank says; where labels are wrong, one whose neighbour has left already may only miss it."""
    said = []
    for column, strategy, _ in REFUSED:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            trainer(strategy(), max_steps=1).fit(build(column), *loaders("llama", 4))
        said.append(str(caught.value))
    return said


def test_refusals_name_the_remedy() -> None:
    for (_, _, text), of_ranks in zip(REFUSED, zip(*run_on_ranks(2, refused), strict=True), strict=True):
        assert text in "".join(of_ranks)
