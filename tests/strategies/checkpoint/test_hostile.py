"""Whatever lies in a checkpoint's place: it is named, no code runs, nothing outside of the run's folder is touched.

`resume="auto"` goes on from the newest valid checkpoint.
"""

import argparse
import copy
import enum
import hashlib
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_parallel import HybridStrategy, ZeroStrategy
from lightning_parallel.checkpoint import commit
from lightning_parallel.checkpoint.files import Content
from lightning_parallel.checkpoint.folder import MANIFEST, TORCH_INDEX, VALUES, read_manifest, write_manifest
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from tests.checkpoint.folders import flip
from tests.heard import heard
from tests.ranks import run_on_ranks
from tests.strategies.checkpoint.saves import FORMS, SaveAt, Tied, fitted, tokens, valid_in
from tests.tiers import sampled
from tests.trainers import trainer

SHARDED = partial(HybridStrategy, checkpoint="sharded")

# ---------------------------------------------------------------- values


def changed(*keys: Any, value: Any) -> Callable[[Any], Any]:
    """Puts another value where keys lead in a checkpoint."""

    def change(content: Any) -> Any:
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        return content

    return change


FIT_LOOP = ("loops", "fit_loop")
HOSTILE: dict[str, Callable[[Any], Any]] = {
    "a number": lambda content: 3,
    "a list": lambda content: [1],
    "nothing": lambda content: {},
    "loops": changed("loops", value=[[1]]),
    "the fit loop": changed(*FIT_LOOP, value="x"),
    "progress": changed(*FIT_LOOP, "epoch_loop.batch_progress", "total", "ready", value={}),
    "callbacks": changed("callbacks", value=[]),
    "the model": changed("state_dict", value=[]),
    "a weight": changed("state_dict", "table.weight", value=torch.ones(2)),
    "optimizers": changed("optimizer_states", value=7),
    "an optimizer": changed("optimizer_states", 0, value="x"),
    "a group": changed("optimizer_states", 0, "param_groups", value=[3]),
    "a learning rate": changed("optimizer_states", 0, "param_groups", 0, "lr", value=[]),
    "positions": changed("lightning_parallel_positions", value=[{}]),
    "randomness": changed("lightning_parallel_randomness", value=[{"host": 1}]),
}
TEXTS = ("[" * 10**5, "3", "[]", "{", '{"!":3}', '{"!":[]}', '{"!":"tensor","v":[]}', '{"!":"tensor","v":"no"}')
TEXTS += ('{"a":{"!":"default","v":["int",3]}}', '{"a":{"!":"default","v":["no",[]]}}', '{"a":{"!":"set","v":[[1]]}}')
TEXTS += ('{"a":{"!":"ordered","v":7}}', '{"a":{"!":"complex","v":[]}}', '{"a":{"!":"size","v":["x"]}}')


def names(path: Path) -> bool:
    """Whether the error of a run that resumes from a checkpoint names it, in its text or in the note below it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        trainer(HybridStrategy(), max_epochs=2).fit(Tied(), tokens(), tokens(), ckpt_path=path)
    return any(str(path) in said for said in (str(caught.value), *getattr(caught.value, "__notes__", [])))


def names_the_file(path: Path) -> None:
    fitted(HybridStrategy, Tied()).save_checkpoint(path)
    with pytest.raises(RuntimeError, match=r"size mismatch for table\.weight") as caught:
        trainer(HybridStrategy()).validate(Tied(width=5), tokens(), ckpt_path=path)
    assert any(str(path) in note for note in vars(caught.value)["__notes__"])
    content = torch.load(path, weights_only=True)
    for what, change in HOSTILE.items():
        AtomicCheckpointIO().save_checkpoint(change(copy.deepcopy(content)), path)
        assert names(path), what
    for text in (b"hello world\n" * 9, b"I1\n.", b"(((("):
        path.write_bytes(text)
        assert names(path), text


def names_the_folder(path: Path) -> None:
    """Whose values are written anew, and their right hash."""
    fitted(SHARDED, Tied()).save_checkpoint(path)
    for text in TEXTS:
        manifest = read_manifest(path)
        (path / VALUES).write_text(text)
        (path / MANIFEST).unlink()
        hashed = Content(len(text), hashlib.sha256(text.encode()).hexdigest())
        write_manifest(path, replace(manifest, files={**manifest.files, VALUES: hashed}))
        assert names(path), text


def test_hostile_values_are_named(tmp_path: Path) -> None:
    run_on_ranks(1, names_the_file, tmp_path / "file.ckpt")
    run_on_ranks(1, names_the_folder, tmp_path / "folder.ckpt")


# ---------------------------------------------------------------- code


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def runs_no_code(path: Path) -> None:
    fitted(HybridStrategy, Tied()).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    canary = path.parent / "canary"
    torch.save({**checkpoint, "note": Payload(canary)}, path)

    def validate(weights_only: bool | None = None, **options: Any) -> None:
        run = trainer(HybridStrategy(**options))
        run.validate(Tied(), tokens(), ckpt_path=path, weights_only=weights_only, verbose=False)

    for given in (None, True):
        with pytest.raises(ValueError, match=r"holds objects that only code can restore .*trust_checkpoint_code=True"):
            validate(given)
    with pytest.raises(ValueError, match="weights_only=False would let the checkpoint run any code"):
        validate(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        with pytest.raises(ValueError, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set"):
            validate()
    assert not canary.exists()
    validate(trust_checkpoint_code=True)
    assert canary.exists()


class Color(enum.Enum):
    RED = 1


@dataclass
class Size:
    width: int = 1


CODE = {
    "PosixPath": Path("data"),
    "argparse.Namespace": argparse.Namespace(a=1),
    "Color": Color.RED,
    "Size": Size(),
    "MSELoss": torch.nn.MSELoss(),
}


class WithCode(Tied):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.hparams["given"] = given


def names_code_when_it_saves(path: Path) -> None:
    """Once, in a full checkpoint; a sharded one is refused."""
    warnings.filterwarnings("ignore", ".*is an instance of `nn.Module`")

    def said(make: Callable[[], Any], given: Any) -> str:
        with heard() as lines:
            run = fitted(make, WithCode(given))
            run.save_checkpoint(path)
            run.save_checkpoint(path)
        return "".join(lines)

    for name, value in CODE.items():
        text = said(HybridStrategy, value)
        assert text.count(name) == text.count("save_hyperparameters(ignore=") == 1, text
        assert text.count("trust_checkpoint_code=True") == 1
    assert said(HybridStrategy, [1, "a", None, {"b": 2.0}]) == ""
    assert said(partial(HybridStrategy, trust_checkpoint_code=True), list(CODE.values())) == ""
    remedy = r"checkpoint\['hyper_parameters'\]\['given'\] is a .*MSELoss.*save_hyperparameters\(ignore=\['given'\]\)"
    with pytest.raises(TypeError, match=remedy):
        fitted(SHARDED, WithCode(CODE["MSELoss"])).save_checkpoint(path.with_suffix(".sharded"))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_code_in_checkpoints_is_named_and_never_run(tmp_path: Path) -> None:
    run_on_ranks(1, runs_no_code, tmp_path / "read" / "file.ckpt")
    run_on_ranks(1, names_code_when_it_saves, tmp_path / "saved" / "file.ckpt")


# ---------------------------------------------------------------- what is removed


def links_before_it_removes(where: Path, make: Callable[[], Any]) -> None:
    last, remove = where / "last.ckpt", commit.remove
    removed: list[tuple[str, bool]] = []

    def watched(path: Path) -> None:
        remove(path)
        removed.append((path.name, last.exists()))

    saver = ModelCheckpoint(where, "{step}", every_n_train_steps=1, save_last="link")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "remove", watched)
        fitted(make, Tied(), callbacks=[saver], enable_checkpointing=True)
    assert removed == [(f"step={step}.ckpt", True) for step in (1, 2, 3)]
    assert sorted(path.name for path in where.iterdir()) == ["last.ckpt", "step=4.ckpt"]


def removes_nothing_outside(path: Path, make: Callable[[], Any]) -> None:
    """The state of a ModelCheckpoint names what it removes next, by a path that begins with its folder."""
    run, victim, inner = path.parent / "run", path.parent / "victim", path.parent / "run" / "inner"
    saver = partial(ModelCheckpoint, run, "{step}", every_n_train_steps=1, monitor="step", mode="max", save_top_k=1)
    fitted(make, Tied(), callbacks=[saver()], enable_checkpointing=True)
    inner.mkdir()
    for named in (run / ".." / "victim", inner / ".."):
        victim.mkdir(exist_ok=True)
        (victim / "thesis.tex").touch()
        fitted(HybridStrategy, Tied(), callbacks=[saver()], enable_checkpointing=True).save_checkpoint(path)
        content = torch.load(path, weights_only=True)
        (state,) = content["callbacks"].values()
        worst = torch.tensor(-1)
        state |= {"best_k_models": {str(named): worst}, "kth_best_model_path": str(named), "kth_value": worst}
        torch.save(content, path)
        with heard() as lines:
            again = trainer(make(), max_epochs=2, callbacks=[saver()], enable_checkpointing=True)
            again.fit(Tied(), tokens(), tokens(), ckpt_path=path)
        assert (victim / "thesis.tex").exists()
        assert (run / "step=8.ckpt").exists()
        assert f"{named} is not removed" in "".join(lines)


def removes(folder: Path, form: str, async_save: bool) -> None:
    make = partial(HybridStrategy, checkpoint=form)
    links_before_it_removes(folder / "links", partial(make, async_save=async_save))
    removes_nothing_outside(folder / "file.ckpt", make)


@sampled(1, ("form", "async_save"), [(form, async_save) for form in FORMS for async_save in (False, True)])
def test_removal_is_late_enough_and_within_the_folder(form: str, async_save: bool, tmp_path: Path) -> None:
    run_on_ranks(1, removes, tmp_path, form, async_save)


# ---------------------------------------------------------------- resume="auto"


def goes_on(where: Path, form: str, expected: int | str, said: str = "") -> int:
    """Fits so many epochs of four steps, or expects an error; tells how many steps the run took in all."""
    often = ModelCheckpoint(where, "{step}", every_n_train_steps=1, save_top_k=-1)
    make = partial(HybridStrategy, checkpoint=form, resume="auto")
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            fitted(make, Tied(), callbacks=[often], enable_checkpointing=True)
        return 0
    with heard(INFO) as lines:
        run = fitted(make, Tied(), max_epochs=expected, callbacks=[often], enable_checkpointing=True)
    assert said in "".join(lines), lines
    return run.global_step


def damage(path: Path) -> None:
    file = max(path.glob("rank*")) if path.is_dir() else path
    flip(file, file.stat().st_size // 2, 0)


def auto(where: Path, form: str) -> None:
    """After the newest checkpoint lacked its name only, after it was damaged, and after all were damaged.

    The first had been whole when its process was killed; the next save sweeps such names away.
    """
    assert goes_on(where, form, 1, "There is no checkpoint in") == 4
    if form == "sharded":
        (where / "step=4.ckpt").rename(commit.temporary_name(where / "step=4.ckpt", commit.UNFINISHED))
    assert goes_on(where, form, 2, f"Resuming from {where / 'step=4.ckpt'}, step 4.") == 8
    assert valid_in(where) == {f"step={step}.ckpt" for step in range(1, 9)}
    fitted(partial(HybridStrategy, checkpoint=form), Tied()).save_checkpoint(where / "weights.ckpt", weights_only=True)
    damage(where / "step=8.ckpt")
    assert goes_on(where, form, 3, "step=7.ckpt, step 7. Skipped: ") == 12
    for path in {*where.glob("step=*")} - {where / "step=8.ckpt"}:  # a second flip would mend it
        damage(path)
    goes_on(where, form, "this run can resume from none of them.*differs.*pass resume=None to start from the beginning")


@sampled(1, "form", FORMS)
def test_runs_go_on_from_the_newest_valid_checkpoint(form: str, tmp_path: Path) -> None:
    run_on_ranks(1, auto, tmp_path / "run", form)


def neighbours(where: Path) -> None:
    """Each would come before the valid one, if its step could be read."""
    assert goes_on(where, "full", 1) == 4
    os.mkfifo(where / "pipe.ckpt")
    (where / "device.ckpt").symlink_to("/dev/zero")
    torch.save({"global_step": None, "optimizer_states": []}, where / "none.ckpt")
    torch.save(3, where / "number.ckpt")
    (where / "text.ckpt").write_text("I1\n." * 9)
    for name, index in (("index.ckpt", b"I1\n."), ("rest.ckpt", b"\x80\x02K\x01.")):
        (where / name).mkdir()
        (where / name / TORCH_INDEX).write_bytes(index)
    (where / "values.ckpt").mkdir()
    (where / "values.ckpt" / MANIFEST).write_text(json.dumps([]))
    assert goes_on(where, "full", 2, "step=4.ckpt, step 4. Skipped: ") == 8


def takes_the_checkpoint_itself(where: Path) -> None:
    """The name of the link comes first; by that of the checkpoint ModelCheckpoint knows that it is in use."""
    fitted(HybridStrategy, Tied()).save_checkpoint(where / "step=4.ckpt")
    commit.link(where / "step=4.ckpt", where / "last.ckpt")
    goes_on(where, "full", 2, "step=4.ckpt, step 4.")


def goes_on_in_the_next_version(where: Path) -> None:
    """A logger counts its runs, and each has a folder of its own."""
    warnings.filterwarnings("ignore", "The dirpath has changed")
    for epochs in (1, 2):
        options = {"logger": CSVLogger(where), "enable_checkpointing": True, "max_epochs": epochs}
        run = fitted(partial(HybridStrategy, resume="auto"), Tied(), callbacks=[ModelCheckpoint()], **options)
    assert run.global_step == 8
    assert "version_0" in str(run.ckpt_path)


def odd_folders(folder: Path) -> None:
    neighbours(folder / "neighbours")
    takes_the_checkpoint_itself(folder / "link")
    goes_on_in_the_next_version(folder / "versions")


def test_odd_neighbours_links_and_versions_are_told_apart(tmp_path: Path) -> None:
    run_on_ranks(1, odd_folders, tmp_path, limit=60)


def saved_within_an_epoch(folder: Path) -> None:
    fitted(partial(HybridStrategy, checkpoint="sharded"), Tied(), callbacks=[SaveAt(folder, [1])])


def other_global_batch(folder: Path) -> None:
    """It would change within an epoch."""
    remedy = r"global batches of 4, but now one has 8 \(2 data-parallel ranks\).*use 2 per rank instead of 4"
    with pytest.raises(ValueError, match=remedy):
        trainer(ZeroStrategy(2), max_epochs=1).fit(Tied(), tokens(), tokens(), ckpt_path=folder / "1.ckpt")


def both_ranks_go_on(folder: Path) -> None:
    made = partial(ZeroStrategy, 2, checkpoint="sharded", resume="auto")
    saved = [SaveAt(folder, [1]), ModelCheckpoint(folder, save_top_k=0)]
    fitted(made, Tied(), callbacks=saved, enable_checkpointing=True)
    again = fitted(made, Tied(), callbacks=saved[1:], enable_checkpointing=True)
    assert str(again.ckpt_path) == str(folder / "1.ckpt")


def test_ranks_go_on_from_the_same_one_and_global_batch(tmp_path: Path) -> None:
    run_on_ranks(1, saved_within_an_epoch, tmp_path / "one")
    run_on_ranks(2, other_global_batch, tmp_path / "one")
    run_on_ranks(2, both_ranks_go_on, tmp_path / "two")
