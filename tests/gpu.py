"""What tests that need a GPU have in common."""

import pytest
import torch


def on_gpu(test):  # type: ignore[no-untyped-def]
    """Marks a test that is skipped where there is no GPU; warnings of libraries do not fail it."""
    marks = (
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        pytest.mark.filterwarnings("ignore"),
    )
    for mark in marks:
        test = mark(test)
    return test
