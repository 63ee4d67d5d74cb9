"""Tracebacks leave out what libraries did between two frames of the script, and nothing else."""

import traceback
from types import TracebackType

import pytest
import torch
from torch import nn

from lightning_parallel.strategies.ranks.tracebacks import _short, own_frames


@torch.no_grad()
def mistaken() -> None:
    raise ValueError("a user's mistake")


@torch.no_grad()
def misused() -> None:
    nn.Linear(3, 4)(torch.ones(2))


def names(trace: TracebackType | None) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(trace)]


def test_frames_between_those_of_the_script_are_left_out() -> None:
    with pytest.raises(ValueError, match="mistake") as failure:
        mistaken()
    whole = failure.value.__traceback__
    shown, left_out = own_frames(whole)
    assert names(shown)[-1] == "mistaken"
    assert left_out == 1
    assert names(whole)[-2:] == ["decorate_context", "mistaken"]
    with _short(failure.value):
        assert names(failure.value.__traceback__) == names(shown)
    assert failure.value.__traceback__ is whole


def test_what_a_library_did_last_stays() -> None:
    with pytest.raises(RuntimeError, match=r"vec|shape") as failure:
        misused()
    shown, left_out = own_frames(failure.value.__traceback__)
    assert names(shown)[-4:] == ["misused", "_wrapped_call_impl", "_call_impl", "forward"]
    assert left_out == 1


def test_a_failure_without_frames_of_the_script_is_shown_whole() -> None:
    with pytest.raises(RuntimeError, match=r"vec|shape") as failure:
        misused()
    whole = failure.value.__traceback__
    while whole is not None and whole.tb_frame.f_code.co_name != "_wrapped_call_impl":
        whole = whole.tb_next
    assert own_frames(whole)[1] == 0
