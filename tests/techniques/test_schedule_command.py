"""The command that prints a schedule, and the script that draws the pictures of the documents."""

import runpy
from pathlib import Path

import pytest

from lightning_parallel.schedule import main
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import SCHEDULES, make_schedule

DOCS = Path(__file__).parents[2] / "docs"


def test_it_prints_grid_bubble_and_peak(capsys: pytest.CaptureFixture[str]) -> None:
    main(["1f1b", "--ranks", "4", "--microbatches", "8"])
    printed = capsys.readouterr().out
    assert printed.startswith("1f1b: 4 ranks, 4 stages, 8 microbatches\n")
    assert make_schedule("1f1b", 4, 8).grid() in printed
    assert "step              33, of which 24 without waiting" in printed
    assert "bubble            27.3 %" in printed
    assert "peak activations  4 3 2 1" in printed


def test_costs_are_those_of_a_ranks_layers(capsys: pytest.CaptureFixture[str]) -> None:
    main(["zbv", "--ranks", "8", "--microbatches", "16", "--costs", "1,1.2,0.8"])
    printed = capsys.readouterr().out
    assert "8 ranks, 16 stages, 16 microbatches, backward split into I and W" in printed
    assert "of which 48 without waiting" in printed
    assert "bubble            8.0 %" in printed


def test_ranks_hold_as_many_stages_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    main(["looped_bfs", "--ranks", "4", "--stages-per-rank", "3", "--microbatches", "2", "--latency", "0.5"])
    assert "4 ranks, 12 stages" in capsys.readouterr().out


def test_a_written_file_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(f"zbv --ranks 2 --microbatches 4 --csv {tmp_path}/own.csv".split())
    first = capsys.readouterr().out
    main([f"{tmp_path}/own.csv"])
    assert capsys.readouterr().out.splitlines()[1:] == first.splitlines()[1:]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_documents_show_it(name: str) -> None:
    assert f"../pictures/schedule_{name}.png" in (DOCS / "guide" / "pipeline_parallel.md").read_text()
    assert (DOCS / "pictures" / f"schedule_{name}.png").stat().st_size < 100_000


def test_the_script_draws_a_schedule(tmp_path: Path) -> None:
    script = runpy.run_path(str(DOCS / "pictures" / "schedules.py"))
    script["draw"](make_schedule("zbv", 2, 4), tmp_path / "zbv.png")
    assert (tmp_path / "zbv.png").stat().st_size > 1_000
