"""Saves and removes the checkpoints of one run, in either form, now or while training goes on."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_parallel.checkpoint import commit
from lightning_parallel.strategies.checkpoint.background import Background
from lightning_parallel.strategies.checkpoint.options import CheckpointOptions
from lightning_parallel.strategies.checkpoint.sharded import Source, prepared
from lightning_parallel.strategies.lightning_package import CheckpointIO, ModelCheckpoint
from lightning_parallel.strategies.ranks.agreement import gather_objects, run_or_raise_on_all

log = logging.getLogger(__name__)


class Saver:
    """Saves checkpoints; all ranks call.

    Args:
        options: the user's.
        io: writes the full form.
        host: all ranks.
        background: all ranks too, for saves that go on while training does; None where none does.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        io: CheckpointIO,
        host: dist.ProcessGroup,
        background: dist.ProcessGroup | None,
    ) -> None:
        self._options, self._io = options, io
        self._host, self._group = host, background
        self._background = Background()
        #: the model's tensors as Lightning got them for the checkpoint that it is putting together
        self.model: dict[str, Any] = {}
        #: the trainer's, which say what is removed
        self.callbacks: Sequence[ModelCheckpoint] = ()
        self._linked: list[Any] = []  # checkpoints to remove as soon as the link to the last one leads to another
        self._read, self._steps = None, 0  # the checkpoint that was read last, training steps begun since

    def save(
        self, checkpoint: dict[str, Any], filepath: Any, source: Source, storage_options: Any, waits: bool
    ) -> None:
        """Saves what Lightning has put together; the path is rank 0's on all ranks.

        Args:
            checkpoint: see Lightning.
            filepath: see Lightning.
            source: where it comes from, but for the model's tensors.
            storage_options: see Lightning.
            waits: whether it is there when this returns, also where saves go on in the background.
        """
        self._remove_linked()
        target = gather_objects(filepath, self._host)[0]
        run = self._save_of(checkpoint, target, replace(source, model=self.model), storage_options)
        self.model = {}
        if self._group is None:
            run(self._host)
            return
        self._background.begin(partial(run, self._group))
        if waits:
            self._background.wait()

    def _save_of(
        self, checkpoint: dict[str, Any], target: Any, source: Source, storage_options: Any
    ) -> Callable[[dist.ProcessGroup], None]:
        if self._options.form == "sharded":
            if storage_options is not None or "://" in str(target):
                raise ValueError(
                    f"{target} is no local path, and checkpoint='sharded' writes to these only; use 'full'"
                )
            return prepared(checkpoint, Path(target), source, self._host, copies=self._group is not None).run
        if self._group is not None and self._host.rank() == 0:
            checkpoint = copy.deepcopy(checkpoint)  # what is on the host already is the model's own memory

        def write() -> None:
            if self._host.rank() == 0:
                self._io.save_checkpoint(checkpoint, target, storage_options=storage_options)

        return lambda group: run_or_raise_on_all(write, f"write the checkpoint {target}", group)

    def remove(self, filepath: Any) -> None:
        """Rank 0 removes a checkpoint, after what is being saved, and after its link is put on another.

        Lightning removes step 1, and only then makes the link to step 2: between the two there would be none.
        """
        if self._host.rank() != 0:
            return
        if _leads_out(filepath, [callback.dirpath for callback in self.callbacks if callback.dirpath is not None]):
            log.warning(
                "%s is not removed, as the checkpoint from which this run resumes asks: it lies outside of the folder "
                "of the ModelCheckpoint; if it is no longer needed, remove it by hand",
                filepath,
            )
            return
        links = [callback.last_model_path for callback in self.callbacks if callback.save_last == "link"]
        target = None if os.path.islink(filepath) else os.path.realpath(filepath)
        if any(os.path.realpath(link) == target for link in links):
            self._linked.append(filepath)
        else:
            self._background.afterwards(partial(self._remove, filepath))

    def _remove_linked(self) -> None:
        for filepath in self._linked:
            self._background.afterwards(partial(self._remove, filepath))
        self._linked = []

    def _remove(self, filepath: Any) -> None:
        if "://" not in str(filepath) and Path(filepath).is_dir():
            commit.remove(Path(filepath))
        else:
            self._io.remove_checkpoint(filepath)

    def link(self, filepath: str, linkpath: str) -> None:
        """Rank 0 makes a link to a checkpoint, once that is saved, in the place of one that was there."""
        if self._host.rank() == 0 and os.path.abspath(filepath) != os.path.abspath(linkpath):
            self._background.afterwards(partial(commit.link, Path(filepath), Path(linkpath)))
        self._remove_linked()

    @property
    def failed(self) -> bool:
        """Whether a save has failed, on all ranks, and nobody has been told."""
        return self._background.failed

    def wait(self) -> None:
        """Returns when nothing is being saved; raises what went wrong."""
        self._background.wait()

    def wait_to_read(self, path: Any) -> None:
        """As `wait`: a checkpoint is about to be read, perhaps the one that is being saved."""
        self._read, self._steps = path, 0
        self.wait()

    def count_step(self) -> None:
        """A training step begins: errors behind the first one no longer name the checkpoint."""
        self._steps += 1

    def said_of_read(self, error: BaseException) -> str:
        """Names the checkpoint behind an error until the first training step is done, such as a wrong type in it."""
        if self._read is None or self._steps > 1 or str(self._read) in str(error):
            return ""
        return f"This happened before the first training step from {self._read} was done; its values may be the cause"

    def fail(self) -> NoReturn:
        """Raises on all ranks what went wrong on any of them."""
        self._background.wait()
        raise RuntimeError("another rank could not finish what follows a save; its message says why")

    def finish(self, failing: bool) -> None:
        """The run ends: as `wait`, but where it ends by another failure this one is only told."""
        if not failing:
            self._remove_linked()
        try:
            self._background.wait()
        except Exception as error:
            if not failing:
                raise
            log.error("The last checkpoint could not be saved: %s", error)


def _leads_out(filepath: Any, folders: Iterable[Any]) -> bool:
    """Whether a path begins with one of the folders and leads out of all of them, as `run/../other` out of `run`."""
    path = Path(filepath).absolute()
    real = path.parent.resolve() / path.name if path.is_symlink() else path.resolve()
    begins = any(Path(folder).absolute() in path.parents for folder in folders)
    return begins and not any(Path(folder).resolve() in real.parents for folder in folders)
