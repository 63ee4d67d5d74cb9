"""Whatever a checkpoint or its folder holds: the file is named, nothing outside of the run's folder is touched."""

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
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parallel import HybridStrategy
from lightning_parallel.checkpoint import commit
from lightning_parallel.checkpoint.hashed import Content
from lightning_parallel.checkpoint.manifest import MANIFEST, VALUES, read_manifest, write_manifest
from lightning_parallel.checkpoint.torch_folder import INDEX
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from tests.ranks import run_on_ranks
from tests.strategies.test_checkpoint_faults import FORMS, LogOf, goes_on
from tests.strategies.test_checkpoint_use import Tied, fitted, tokens
from tests.tiers import covering
from tests.trainers import trainer

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
    "findings": changed("lightning_parallel_findings", value=3),
}


def names_the_file(path: Path) -> None:
    fitted(HybridStrategy, Tied()).save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    for what, change in HOSTILE.items():
        AtomicCheckpointIO().save_checkpoint(change(copy.deepcopy(content)), path)
        assert names(path), what
    for text in (b"hello world\n" * 9, b"I1\n.", b"(((("):
        path.write_bytes(text)
        assert names(path), text


def names(path: Path) -> bool:
    """Whether the error of a run that resumes from a checkpoint names it, in its text or in the note below it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        trainer(HybridStrategy(), max_epochs=2).fit(Tied(), tokens(), tokens(), ckpt_path=path)
    return any(str(path) in said for said in (str(caught.value), *getattr(caught.value, "__notes__", [])))


def test_hostile_values_of_a_full_checkpoint_are_named(tmp_path: Path) -> None:
    run_on_ranks(1, names_the_file, tmp_path / "file.ckpt")


TEXTS = ("[" * 10**5, "3", "[]", "{", '{"!":3}', '{"!":[]}', '{"!":"tensor","v":[]}', '{"!":"tensor","v":"no"}')
TEXTS += ('{"a":{"!":"default","v":["int",3]}}', '{"a":{"!":"default","v":["no",[]]}}', '{"a":{"!":"set","v":[[1]]}}')
TEXTS += ('{"a":{"!":"ordered","v":7}}', '{"a":{"!":"complex","v":[]}}', '{"a":{"!":"size","v":["x"]}}')


def names_the_folder(path: Path) -> None:
    fitted(partial(HybridStrategy, checkpoint="sharded"), Tied()).save_checkpoint(path)
    for text in TEXTS:
        with_values(path, text)
        assert names(path), text


def with_values(path: Path, text: str) -> None:
    """Writes the values of a sharded checkpoint anew, and their right hash."""
    manifest = read_manifest(path)
    (path / VALUES).write_text(text)
    (path / MANIFEST).unlink()
    content = Content(len(text), hashlib.sha256(text.encode()).hexdigest())
    write_manifest(path, replace(manifest, files={**manifest.files, VALUES: content}))


def test_hostile_values_of_a_sharded_checkpoint_are_named(tmp_path: Path) -> None:
    run_on_ranks(1, names_the_folder, tmp_path / "folder.ckpt")


def a_users_error_stays(path: Path) -> None:
    fitted(HybridStrategy, Tied(width=6)).save_checkpoint(path)
    with pytest.raises(RuntimeError, match=r"size mismatch for table\.weight") as caught:
        trainer(HybridStrategy()).validate(Tied(width=5), tokens(), ckpt_path=path)
    assert any(str(path) in note for note in vars(caught.value)["__notes__"])


def test_an_error_of_another_library_keeps_its_class_and_text(tmp_path: Path) -> None:
    run_on_ranks(1, a_users_error_stays, tmp_path / "file.ckpt")


# ---------------------------------------------------------------- neighbours


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
        (where / name / INDEX).write_bytes(index)
    (where / "values.ckpt").mkdir()
    (where / "values.ckpt" / MANIFEST).write_text(json.dumps([]))
    assert goes_on(where, "full", 2, "step=4.ckpt, step 4. Skipped: ") == 8


def test_odd_neighbours_do_not_keep_a_run_from_the_valid_checkpoint(tmp_path: Path) -> None:
    run_on_ranks(1, neighbours, tmp_path / "run", limit=60)


def takes_the_checkpoint_itself(where: Path) -> None:
    """The name of the link comes first; by that of the checkpoint ModelCheckpoint knows that it is in use."""
    fitted(HybridStrategy, Tied()).save_checkpoint(where / "step=4.ckpt")
    commit.link(where / "step=4.ckpt", where / "last.ckpt")
    goes_on(where, "full", 2, "step=4.ckpt, step 4.")


def test_a_run_goes_on_from_the_checkpoint_and_not_from_a_link_to_it(tmp_path: Path) -> None:
    run_on_ranks(1, takes_the_checkpoint_itself, tmp_path / "run")


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


@covering(keep=1, form=FORMS, async_save=(False, True))
def test_the_link_to_the_last_one_leads_somewhere_whenever_one_is_removed(
    form: str, async_save: bool, tmp_path: Path
) -> None:
    make = partial(HybridStrategy, checkpoint=form, async_save=async_save)
    run_on_ranks(1, links_before_it_removes, tmp_path / "run", make)


def removes_nothing_outside(path: Path, form: str) -> None:
    """The state of a ModelCheckpoint names what it removes next, by a path that begins with its folder."""
    run, victim, inner = path.parent / "run", path.parent / "victim", path.parent / "run" / "inner"
    saver = partial(ModelCheckpoint, run, "{step}", every_n_train_steps=1, monitor="step", mode="max", save_top_k=1)
    make = partial(HybridStrategy, checkpoint=form)
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
        with LogOf("lightning_parallel.strategies.checkpoint.saver") as log:
            again = trainer(make(), max_epochs=2, callbacks=[saver()], enable_checkpointing=True)
            again.fit(Tied(), tokens(), tokens(), ckpt_path=path)
        assert (victim / "thesis.tex").exists()
        assert (run / "step=8.ckpt").exists()
        assert f"{named} is not removed" in log.text


@covering(keep=1, form=FORMS)
def test_nothing_outside_of_the_folder_is_removed(form: str, tmp_path: Path) -> None:
    run_on_ranks(1, removes_nothing_outside, tmp_path / "file.ckpt", form)


# ---------------------------------------------------------------- what is saved


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


def warns_when_it_saves(path: Path) -> None:
    warnings.filterwarnings("ignore", ".*is an instance of `nn.Module`")

    def said(make: Callable[[], Any], given: Any) -> str:
        with LogOf("lightning_parallel.strategies.checkpoint.reading") as log:
            run = fitted(make, WithCode(given))
            run.save_checkpoint(path)
            run.save_checkpoint(path)
        return log.text

    for name, value in CODE.items():
        text = said(HybridStrategy, value)
        assert text.count(name) == text.count("save_hyperparameters(ignore=") == 1, text
        assert text.count("trust_checkpoint_code=True") == 1
    assert said(HybridStrategy, [1, "a", None, {"b": 2.0}]) == ""
    assert said(partial(HybridStrategy, trust_checkpoint_code=True), list(CODE.values())) == ""


def test_what_only_code_could_bring_back_is_named_when_a_full_checkpoint_is_saved(tmp_path: Path) -> None:
    run_on_ranks(1, warns_when_it_saves, tmp_path / "file.ckpt")
