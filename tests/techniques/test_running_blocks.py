"""Which layers a pipeline takes for blocks, where the plan is inferred and a step runs some lists of layers only."""

from types import SimpleNamespace

import pytest
from torch import nn

from lightning_parallel.plan import ParallelPlan
from lightning_parallel.plan.find import find_plan, running_blocks


class Layer(nn.Linear):
    pass


class Multimodal(nn.Module):
    """A tower for images, and layers for texts."""

    def __init__(self, classes: list[str]) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Layer(8, 8) for _ in range(3))
        self.texts = nn.ModuleList(Layer(4, 4) for _ in range(2))
        self._no_split_modules = classes


def called(text_layers: int) -> set[str]:
    return {"", *(f"texts.{k}" for k in range(text_layers))}


@pytest.mark.parametrize("classes", [["Layer"], []])
def test_lists_that_run_are_taken(classes: list[str]) -> None:
    """By the metadata both lists are blocks, by the structure the larger one is."""
    model = Multimodal(classes)
    plan = find_plan(model)
    assert plan.inferred
    assert "tower.0" in plan.find_blocks(model)
    assert list(running_blocks(plan, model, called(2))) == ["texts.0", "texts.1"]


@pytest.mark.parametrize("classes", [["Layer"], []])
@pytest.mark.parametrize("layers", [0, 1])
def test_lists_of_which_a_part_runs_are_not(classes: list[str], layers: int) -> None:
    model = Multimodal(classes)
    assert running_blocks(find_plan(model), model, called(layers)) == {}


def test_blocks_of_an_fsdp_plan_are_taken() -> None:
    """A model of Hugging Face may name patterns in its configuration, and no classes."""
    model = Multimodal([])
    model.config = SimpleNamespace(base_model_fsdp_plan={"texts.*": "free_full_weight", "norm": "keep_full_weight"})
    plan = find_plan(model)
    assert plan.blocks == ("texts.*",)
    assert plan.source == "the metadata of Multimodal"


class Named(Multimodal):
    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("tower.*", "texts.*"))


def test_what_somebody_named_is_not_inferred() -> None:
    assert not find_plan(Named([])).inferred
    assert not find_plan(Multimodal([]), ParallelPlan(blocks="tower.*")).inferred


class Comparing(Multimodal):
    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(whole_batch="texts.1", styles={"texts.0": "colwise"})


@pytest.mark.parametrize(
    ("model", "given", "texts"),
    [
        (Multimodal([]), ParallelPlan(whole_batch="texts.1"), False),  # the structure: the larger list
        (Multimodal(["Layer"]), ParallelPlan(whole_batch="texts.1"), True),  # the metadata: both
        (Comparing(["Layer"]), None, True),
        (Named([]), ParallelPlan(whole_batch="texts.1"), True),
        (Comparing(["Layer"]), ParallelPlan(whole_batch="texts.0"), True),
    ],
)
def test_a_plan_that_names_no_blocks_adds_to_what_is_found(
    model: Multimodal, given: ParallelPlan | None, texts: bool
) -> None:
    plan = find_plan(model, given)
    assert plan.whole_batch == (("texts.1",) if given is None else given.whole_batch)
    assert plan.styles == ({"texts.0": "colwise"} if isinstance(model, Comparing) else {})
    assert list(plan.find_blocks(model)) == [f"tower.{k}" for k in range(3)] + [f"texts.{k}" for k in range(2)] * texts
    assert plan.inferred == (not isinstance(model, Named))
    assert (given or plan).source.split(",")[0] in plan.source
