"""A few architectures by default, all under `exhaustive`; `python -m tests.compatibility` makes the document."""

import pytest
import torch

from tests.compatibility.architectures import architectures
from tests.compatibility.handwritten import written
from tests.compatibility.sweep import NOT_TRIED, Result, first_difference, fits, sweep
from tests.compatibility.table import document
from tests.compatibility.trial import TECHNIQUES, Trained
from tests.curves import Curve
from tests.tiers import sampled

SHARDS = 10
FINE = ("exact", "as halves", "refused", NOT_TRIED)
FEW = [
    ("bert", "dp2"),
    ("bart", "pp2"),
    ("vit", "tp2"),
    ("mixtral", "zero3"),
    ("mamba", "pp2"),
    ("RotaryComplex", "cp2"),
    ("Permuted", "tp2"),
    ("WithLora", "tp2 whole"),
]


@sampled(1, ("name", "technique"), FEW)
def test_architecture_trains_as_one_process(name, technique):
    (result,) = sweep([(architectures() | written())[name]], [technique], set())
    assert result.result == "exact", result.detail


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", range(SHARDS))
def test_architectures_are_never_wrong_nor_wait(shard):
    """Each under one technique, by turns; the command tries all pairs."""
    every = list((architectures() | written()).values())
    found: list[Result] = []
    for number in range(shard, len(every), SHARDS):
        fitting = [technique for technique in TECHNIQUES if fits(every[number], technique)]
        found += sweep([every[number]], [fitting[number // SHARDS % len(fitting)]], set())
    assert [result for result in found if result.result not in FINE] == []


def test_difference_is_not_called_exact():
    reference, other = (Trained(Curve([1.0], [], {"w": torch.tensor([1.0, 1.0 + more])})) for more in (0, 1e-6))
    assert first_difference(reference.curve, [reference, reference]) == ""
    assert first_difference(reference.curve, [reference, other]).startswith("rank 1: weight w of shape (2,)")


def test_document_counts_results_and_gives_reasons():
    text = document(
        [
            Result("bert", "text encoder", "dp2", "exact", commit="1234"),
            Result("bert", "text encoder", "pp2", "refused", "it has no blocks; name them", commit="1234"),
            Result("gone", "vision", "dp2", NOT_TRIED, "it cannot be built", commit="1234"),
        ]
    )
    assert text.startswith("# Compatibility\n\n1 architectures of transformers and 0 modules written by hand")
    assert "| pp2: `PipelineParallelStrategy()` | 0 | 0 | 1 |" in text
    assert "- `bert`: exact under dp2; refused under pp2" in text
    assert "- `bert` (pp2): it has no blocks; name them" in text
    assert "- it cannot be built: `gone`" in text
