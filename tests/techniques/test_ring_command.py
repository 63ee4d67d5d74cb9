"""The command that shows a ring: what it prints and draws."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_rgb

from lightning_parallel.ring import main
from lightning_parallel.techniques.context_parallel.attention.course import course
from lightning_parallel.techniques.context_parallel.attention.picture import COLOURS


def test_it_prints_steps_work_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--ranks", "4"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == (
        "ring, causal: 4 ranks · 64 positions · scores max/mean 1.00 · 51 % of all scores computed · "
        "75 % of keys and values sent"
    )
    assert printed[2].split() == ["step", "0", "step", "1", "step", "2", "step", "3", "scores", "sent"]
    assert printed[4].split() == ["rank", "1", "1:", "136", "0:", "128", "3:", "128", "2:", "128", "520", "32"]


def test_consecutive_chunks_are_no_equal_work(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--ranks", "4", "--contiguous"])
    printed = capsys.readouterr().out
    assert "max/mean 1.74" in printed
    assert "rank 0  0: 136       -       -       -     136    48" in printed


def test_every_pair_of_positions_meets_in_one_step() -> None:
    for ranks, size, mask in ((1, 5, "causal"), (3, 20, "full"), (4, 64, "causal")):
        shown = course(ranks, size, mask)
        scores = sum(shown.scores(rank, step) for rank in range(ranks) for step in range(ranks))
        assert scores == (size**2 if mask == "full" else size * (size + 1) // 2)
        assert len({(*meeting.queries, *meeting.keys) for meeting in shown.meetings}) == len(shown.meetings)


def test_masks_rule_out_steps() -> None:
    shown = course(4, 64, "documents:32,32")
    assert {
        (meeting.rank, meeting.step) for meeting in shown.meetings if meeting.queries[0] < 32 <= meeting.keys[0]
    } == set()
    window = course(6, 60, "window:7")
    assert not any(meeting.step == 3 for meeting in window.meetings)
    assert [window.scores(rank, 3) for rank in range(6)] == [0] * 6


def test_the_picture_shows_every_rank(tmp_path: Path) -> None:
    main(f"--ranks 4 --mask window:9 --png {tmp_path}/out.png".split())
    pixels = np.round(255 * image.imread(tmp_path / "out.png")[:, :, :3]).astype(int)
    seen = {tuple(pixel) for pixel in pixels.reshape(-1, 3)}
    colours = [tuple(round(255 * part) for part in to_rgb(colour)) for colour in COLOURS]
    assert [colour in seen for colour in colours] == [True] * 4 + [False] * 4


def test_a_vector_picture_carries_its_words(tmp_path: Path) -> None:
    main(f"--ranks 2 --positions 8 --png {tmp_path}/out.svg".split())
    drawn = (tmp_path / "out.svg").read_text()
    for text in ("ring · causal", "step 1: keys of the rank 1 before", "queries from top to bottom"):
        assert text in drawn
