"""Models that tensor parallelism divides as they mean it, and those that it refuses or leaves whole."""

from __future__ import annotations

import logging
import logging.handlers
import re
from functools import partial
from typing import Any

import pytest

from lightning_parallel import ParallelPlan, TensorParallelStrategy
from tests.curves import Curve, check_parity, compare, train
from tests.models import build, loaders
from tests.ranks import begun_on_one, run_on_ranks
from tests.techniques.tensor_layouts import SHORT, TP2, WHOLE_SEQUENCE, check
from tests.tiers import covering, sampled
from tests.trainers import trainer

ONE_EPOCH: dict[str, Any] = {"max_epochs": 1, "data": SHORT}

# ---------------------------------------------------------------- what is refused, and what is not known


def fit(module: Any, strategy: Any, column: str = "llama") -> None:
    trainer(strategy, max_steps=1).fit(module, *loaders(column, 4))


def refused(column: str, n: int, strategy: Any, **model: Any) -> str:
    """What the ranks say; one whose neighbour has left already may only miss it."""
    return "".join(run_on_ranks(n, error_of, column, strategy, model))


def error_of(column: str, strategy: Any, model: dict[str, Any]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fit_column(column, strategy, model)
    return str(caught.value)


def fit_column(column: str, strategy: Any, model: dict[str, Any]) -> None:
    fit(build(column, **model), strategy(), column)


@sampled(
    1,
    ("column", "gathered"),
    [
        ("hard coded", ()),
        ("norm of each head", ("unbind",)),
        ("counting features", ("cat",)),
        ("side by side", ("unflatten",)),
        ("mixes positions", ()),
        ("shifting", ("cat",)),
        ("counting positions", ()),
        ("encoding", ()),
        ("from its input", ()),
    ],
)
def test_what_ranks_cannot_divide_is_gathered_and_said(column: str, gathered: tuple[str, ...]) -> None:
    expected = begun_on_one(train, column, **ONE_EPOCH)
    for got, _ in (found := run_on_ranks(2, trained_and_said, column)):
        compare(expected.result(), got)
    assert operations_that_gather("".join(said for _, said in found)) == {*gathered}


def trained_and_said(column: str) -> tuple[Curve, str]:
    handler, log = logging.handlers.BufferingHandler(1000), logging.getLogger("lightning_parallel")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    curve = train(column, TP2, **ONE_EPOCH)
    log.setLevel(level)
    log.removeHandler(handler)
    return curve, "\n".join(record.getMessage() for record in handler.buffer)


def operations_that_gather(said: str) -> set[str]:
    lines = [line.split() for line in said.splitlines() if re.search(r"\(\d.*\) +\d+ +[\d,]+$", line)]
    return {line[0] for line in lines}


@sampled(1, "strategy", [WHOLE_SEQUENCE, TP2])  # the table above has the other
def test_attention_that_takes_its_width_from_its_input(strategy: Any) -> None:
    check_parity("from its input", 2, strategy, gradient_clip_val=0.5, **ONE_EPOCH)


@covering(keep=1, strategy=(TP2, WHOLE_SEQUENCE), column=("conditioned", "gating"))
def test_gradients_where_replicated_meets_divided(column: str, strategy: Any) -> None:
    check_parity(column, 2, strategy, gradient_clip_val=0.5, **ONE_EPOCH)


@sampled(1, "strategy", [TP2, WHOLE_SEQUENCE])
def test_a_gradient_of_a_gradient(strategy: Any) -> None:
    check_parity("penalised", 2, strategy, gradient_clip_val=0.5, **ONE_EPOCH)


def test_what_is_out_of_bounds_is_refused() -> None:
    assert "is out of bounds: there are 64 rows in the embedding" in refused("out of bounds", 2, TP2)


@sampled(1, "strategy", [TP2, WHOLE_SEQUENCE])
def test_a_number_of_heads_in_an_attribute_is_this_ranks(strategy: Any) -> None:
    check_parity("counting", 2, strategy, gradient_clip_val=0.5, **ONE_EPOCH)


@sampled(1, "column", ["between", "recomputing", "distilling"])
def test_what_happens_between_blocks_sees_the_whole_sequence(column: str) -> None:
    check_parity(column, 2, TP2, max_epochs=1, data=ONE_EPOCH["data"] | {"length": 15})


@sampled(1, "strategy", [TP2, WHOLE_SEQUENCE])
def test_layers_that_recompute_themselves(strategy: Any) -> None:
    check("checkpointed", 2, strategy, max_epochs=1, model={"num_hidden_layers": 2})


def test_what_hooks_within_a_block_see_is_whole() -> None:
    check("mixtral", 2, TP2, max_epochs=1, model={"num_hidden_layers": 2, "output_router_logits": True})


def test_unknown_model_gets_a_plan_to_start_from() -> None:
    said = refused("unknown", 2, TP2)
    assert "finds nothing to divide in Unknown" in said
    assert "styles={'net.layers.*.up': 'colwise'" in said


PLAN = ParallelPlan(
    blocks="network.model.layers.*",
    styles={
        "network.model.layers.*.mlp.up_proj": "colwise",
        "network.model.layers.*.mlp.gate_proj": "colwise",
        "network.model.layers.*.mlp.down_proj": "rowwise",
    },
)


def test_plan_of_ones_own() -> None:
    check("llama", 2, partial(TensorParallelStrategy, 2, plan=PLAN), max_epochs=1)
    wrong = ParallelPlan(blocks=PLAN.blocks, styles={"network.model.layers.*.mlp.up_proj": "columnwise"})
    said = refused("llama", 2, partial(TensorParallelStrategy, 2, plan=wrong))
    assert "the tensor style 'columnwise' is none of colwise, rowwise" in said
