"""A few architectures by default, all under `exhaustive`; `python -m tests.compatibility` makes the document."""

import pytest
import torch

from tests.compatibility.architectures import Architecture, architectures
from tests.compatibility.handwritten import written
from tests.compatibility.sweep import NOT_TRIED, Result, first_difference, sweep
from tests.compatibility.table import document
from tests.compatibility.trial import TECHNIQUES, Trained
from tests.curves import Curve
from tests.tiers import covering

SHARDS = 20
FINE = ("exact", "as halves", "refused", NOT_TRIED)
FEW = {
    "bert": "text encoder",
    "bart": "encoder-decoder",
    "qwen3": "text decoder",
    "mixtral": "text decoder",
    "mamba": "text decoder",
    "vit": "vision",
}


@covering(keep=1, architecture=FEW, technique=("dp2", "zero3", "pp2"))
def test_an_architecture_trains_as_in_one_process(architecture, technique):
    known = architectures()[architecture]
    assert known.family == FEW[architecture]
    (result,) = sweep([known], [technique], set())
    assert result.result == "exact", result.detail


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_architecture_is_wrong_or_waits_or_fails_without_a_reason(shard):
    some: list[Architecture] = list(architectures().values())[shard::SHARDS]
    found = list(sweep(some, ["dp2", "zero3", "pp2"], set()))
    assert [result for result in found if result.result not in FINE] == []


@covering(keep=1, name=("RotaryComplex", "Permuted", "WithLora"), technique=("tp2", "tp2 whole", "cp2"))
def test_a_module_written_by_hand_trains_as_in_one_process(name, technique):
    (result,) = sweep([written()[name]], [technique], set())
    assert result.result == "exact", result.detail


@pytest.mark.exhaustive
@pytest.mark.parametrize("technique", ["dp2", "zero3", "pp2", "tp2", "tp2 whole", "cp2"])
@pytest.mark.parametrize("family", ["attention", "positions", "features"])
def test_no_module_written_by_hand_is_wrong(family, technique):
    some = [each for each in written().values() if each.family.startswith(family)]
    found = list(sweep(some, [technique], set()))
    assert [result for result in found if result.result not in FINE] == []


def test_what_differs_is_not_called_exact():
    reference, other = Trained(Curve([1.0], [], {"w": torch.ones(2)})), Trained(Curve([1.0], [], {"w": torch.ones(2)}))
    assert first_difference(reference.curve, [other, other]) == ""
    other = Trained(Curve([1.0], [], {"w": torch.tensor([1, 1 + 1e-6])}))
    assert first_difference(reference.curve, [reference, other]).startswith("rank 1: weight w of shape (2,)")


def test_document_counts_every_result_and_says_why():
    results = [
        Result("bert", "text encoder", "dp2", "exact", commit="1234"),
        Result("bert", "text encoder", "pp2", "refused", "it has no blocks; name them", commit="1234"),
        Result("gone", "vision", "dp2", NOT_TRIED, "it cannot be built", commit="1234"),
    ]
    text = document(results)
    assert text.startswith("# Compatibility\n\n1 architectures of transformers and 0 modules written by hand")
    assert "| `bert` | exact | refused |" in text
    assert "- `bert` (pp2): it has no blocks; name them" in text
    assert "- `gone`: it cannot be built" in text
    assert set(TECHNIQUES) >= {"dp2", "dp2 padded", "zero3", "pp2", "tp2"}
