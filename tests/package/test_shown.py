"""The commands that show something: what they refuse, and what they say is missing."""

import sys
from collections.abc import Callable

import pytest

from lightning_parallel.ring import main as show_ring
from lightning_parallel.schedule import main as show_schedule


@pytest.mark.parametrize(
    ("show", "line", "message"),
    [
        (show_ring, "", "the following arguments are required: --ranks"),
        (
            show_ring,
            "--ranks 4 --positions 7",
            "7 positions are too few for two chunks on each of 4 ranks; give at least 8",
        ),
        (show_ring, "--ranks 0", "too few for two chunks on each of 0 ranks"),
        (show_ring, "--ranks 2 --mask window", "mask 'window' is none of causal, full, window:N, documents:A,B,..."),
        (show_ring, "--ranks 2 --mask window:3,4", "is none of causal"),
        (show_ring, "--ranks 2 --mask documents:20,x", "is none of causal"),
        (show_ring, "--ranks 2 --mask documents:20,20", "documents of 40 positions do not fill a sequence of 64"),
        (show_ring, "--ranks 2 --png out.bmpx", "Format 'bmpx' is not supported"),
        (show_schedule, "1f1b --microbatches 4", "the size of 1f1b is missing; give --ranks and --microbatches"),
        (show_schedule, "1f1b --ranks 4", "the size of 1f1b is missing"),
        (show_schedule, "1f1b --ranks 2 --microbatches 4 --costs 1,2", "'1,2' is not three numbers F,I,W, as in 1,1,1"),
        (show_schedule, "interleaved_1f1b --ranks 4 --microbatches 9", "nearest are 8 and 10"),
        (show_schedule, "1f1c --ranks 4 --microbatches 9", "did you mean '1f1b'"),
        (show_schedule, "missing.csv", "there is no file missing.csv"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    show: Callable[..., None], line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        show(line.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        show_ring(["--ranks", "2", "--png", "out.png"])
    assert "pip install 'lightning-parallel[recipes]'" in capsys.readouterr().err
