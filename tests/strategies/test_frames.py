"""Where another thread stands."""

import threading
from collections.abc import Callable

import pytest

from lightning_parallel.strategies.ranks.frames import NOWHERE, Frame, frames_of


def seen(stand: Callable[[Callable[[], None]], None]) -> list[Frame]:
    """The frames of a thread while it is in a function."""
    there, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        there.set()
        assert go_on.wait(20)

    thread = threading.Thread(target=stand, args=(wait,))
    thread.start()
    try:
        assert there.wait(20)
        return frames_of(thread.ident or 0)
    finally:
        go_on.set()
        thread.join()


def weiter_außen(call: Callable[[], None]) -> None:
    call()


def deep(call: Callable[[], None], left: int = 150) -> None:
    return deep(call, left - 1) if left else call()


def test_frames_are_in_the_order_of_calls_with_file_line_and_name() -> None:
    frames = [frame for frame in seen(weiter_außen) if frame.file == __file__]
    assert [frame.function for frame in frames] == ["weiter_außen", "wait"]
    assert frames[0].line == weiter_außen.__code__.co_firstlineno + 1


def test_of_many_there_are_the_innermost() -> None:
    frames = [frame for frame in seen(deep) if frame.file == __file__]
    assert len(frames) > 90
    assert frames[-1].function == "wait"


@pytest.mark.parametrize("thread", [0, 123])
def test_a_thread_that_is_gone_is_nowhere(thread: int) -> None:
    assert frames_of(thread) == [NOWHERE]
