"""The command that shows a schedule: what it refuses."""

import pytest

from lightning_parallel.schedule import main as show_schedule


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1f1b --microbatches 4", "the size of 1f1b is missing; give --ranks and --microbatches"),
        ("1f1b --ranks 4", "the size of 1f1b is missing"),
        ("1f1b --ranks 2 --microbatches 4 --costs 1,2", "'1,2' is not three numbers F,I,W, as in 1,1,1"),
        ("interleaved_1f1b --ranks 4 --microbatches 9", "nearest are 8 and 10"),
        ("1f1c --ranks 4 --microbatches 9", "did you mean '1f1b'"),
        ("missing.csv", "there is no file missing.csv"),
    ],
)
def test_what_cannot_be_shown_is_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        show_schedule(line.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
