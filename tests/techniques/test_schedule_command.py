"""The command that shows a schedule: what it prints, draws and writes."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_rgb

from lightning_parallel.schedule import main
from lightning_parallel.techniques.pipeline_parallel.schedule.picture import BUBBLE, LOOKS
from lightning_parallel.techniques.pipeline_parallel.schedule.schedules import SCHEDULES, ActionKind, make_schedule


def test_it_prints_grid_bubble_and_peak(capsys: pytest.CaptureFixture[str]) -> None:
    main(["1f1b", "--stages", "4", "--microbatches", "8"])
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


def test_stages_are_divided_over_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["looped_bfs", "--stages", "12", "--stages-per-rank", "3", "--microbatches", "2", "--latency", "0.5"])
    assert "4 ranks, 12 stages" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["interleaved_1f1b", "dualpipev"])
def test_the_picture_shows_every_kind_of_work(name: str, tmp_path: Path) -> None:
    main(f"{name} --ranks 2 --microbatches 4 --png {tmp_path}/out.png".split())
    schedule = make_schedule(name, 2, 4)
    kinds = {action.kind for row in schedule.computations for action in row}
    shades = {shade for kind in kinds for shade in LOOKS[kind][1]} | {BUBBLE}
    absent = {shade for kind in set(LOOKS) - kinds for shade in LOOKS[kind][1]}
    pixels = np.round(255 * image.imread(tmp_path / "out.png")[:, :, :3]).astype(int)
    seen = {tuple(pixel) for pixel in pixels.reshape(-1, 3)}
    assert all(tuple(round(255 * part) for part in to_rgb(shade)) in seen for shade in shades)
    assert not any(tuple(round(255 * part) for part in to_rgb(shade)) in seen for shade in absent)


def test_a_vector_picture_carries_title_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(f"gpipe --ranks 2 --microbatches 3 --png {tmp_path}/out.svg".split())
    drawn = (tmp_path / "out.svg").read_text()
    for text in ("gpipe", "bubble 25.0 % · peak activations 3", LOOKS[ActionKind.B][0]):
        assert f"<!-- {text}" in drawn or text in drawn
    assert drawn.count("<!-- 2 -->") >= 4, "F and B of microbatch 2 on two ranks"


def test_a_written_file_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(f"zbv --ranks 2 --microbatches 4 --csv {tmp_path}/own.csv".split())
    first = capsys.readouterr().out
    main([f"{tmp_path}/own.csv"])
    assert capsys.readouterr().out.splitlines()[1:] == first.splitlines()[1:]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_documents_show_it(name: str) -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert f"../pictures/schedule_{name}.png" in (docs / "techniques" / "pipeline_parallel.md").read_text()
    assert (docs / "pictures" / f"schedule_{name}.png").stat().st_size < 100_000
