"""`lightning-parallel`: what it runs, tells and refuses."""

import os
import sys

import pytest

from lightning_parallel.__main__ import EXTRA, main, recipes
from lightning_parallel.schedule import main as show
from tests.package.test_import import NEEDED, ROOT, imported_at_once


def test_schedule_is_the_command_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["1f1b", "--ranks", "2", "--microbatches", "4"]
    show(line)
    shown = capsys.readouterr().out
    main(["schedule", *line])
    assert capsys.readouterr().out == shown


def test_train_takes_hydras_overrides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-parallel"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    main(["train", "--cfg", "job", "seed=3", "strategy=pipeline_parallel"])
    shown = capsys.readouterr().out
    assert "seed: 3\n" in shown
    assert "_target_: lightning_parallel.PipelineParallel\n" in shown
    assert sys.argv[0] == str(ROOT / "recipes" / "train.py"), "what launched processes run"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: command"),
        ("trian", "invalid choice: 'trian'"),
        ("schedule 1f1b --ranks 4", "lightning-parallel schedule: error: the size of 1f1b is missing"),
        ("schedule 1f1b --microbatches 4", "the size of 1f1b is missing; give --ranks and --microbatches"),
        ("schedule 1f1b --ranks 2 --microbatches 4 --costs 1,2", "'1,2' is not three numbers F,I,W, as in 1,1,1"),
        ("schedule interleaved_1f1b --ranks 4 --microbatches 9", "nearest are 8 and 10"),
        ("schedule 1f1c --ranks 4 --microbatches 9", "did you mean '1f1b'"),
        ("schedule missing.csv", "there is no file missing.csv"),
    ],
)
def test_mistakes_are_told(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", EXTRA)
def test_missing_extra_is_named_with_what_to_install(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit):
        main(["train"])
    assert f"training needs {module}: pip install 'lightning-parallel[recipes]'" in capsys.readouterr().err


def test_the_extra_is_what_the_recipe_imports() -> None:
    found = {name for file in recipes().glob("*.py") for name in imported_at_once(file)}
    brought_along = {"omegaconf"}  # by hydra-core
    assert found - NEEDED - brought_along - sys.stdlib_module_names - {"recipes"} == set(EXTRA)


def test_help_tells_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "lightning-parallel train experiment=gpt-124m" in shown
    assert "lightning-parallel schedule zbv" in shown
