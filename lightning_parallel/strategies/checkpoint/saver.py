"""Saves and removes the checkpoints of one run, in either form, now or while training goes on."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_parallel.checkpoint import commit
from lightning_parallel.strategies.checkpoint.background import Background
from lightning_parallel.strategies.checkpoint.options import CheckpointOptions
from lightning_parallel.strategies.checkpoint.sharded import Source, prepared
from lightning_parallel.strategies.lightning_package import CheckpointIO
from lightning_parallel.strategies.ranks.agreement import gather_objects, together

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

        return lambda group: together(write, f"write the checkpoint {target}", group)

    def remove(self, filepath: Any) -> None:
        """Rank 0 removes a checkpoint, after what is being saved."""
        if self._host.rank() == 0:
            self._background.afterwards(partial(self._remove, filepath))

    def _remove(self, filepath: Any) -> None:
        if "://" not in str(filepath) and Path(filepath).is_dir():
            commit.remove(Path(filepath))
        else:
            self._io.remove_checkpoint(filepath)

    def link(self, filepath: str, linkpath: str) -> None:
        """Rank 0 makes a link to a checkpoint, once that is saved, in the place of one that was there."""
        if self._host.rank() == 0 and os.path.abspath(filepath) != os.path.abspath(linkpath):
            self._background.afterwards(partial(commit.link, Path(filepath), Path(linkpath)))

    @property
    def failed(self) -> bool:
        """Whether a save has failed, on all ranks, and nobody has been told."""
        return self._background.failed

    def wait(self) -> None:
        """Returns when nothing is being saved; raises what went wrong."""
        self._background.wait()

    def fail(self) -> NoReturn:
        """Raises on all ranks what went wrong on any of them."""
        self._background.wait()
        raise RuntimeError("another rank could not finish what follows a save; its message says why")

    def finish(self, failing: bool) -> None:
        """The run ends: as `wait`, but where it ends by another failure this one is only told."""
        try:
            self._background.wait()
        except Exception as error:
            if not failing:
                raise
            log.error("The last checkpoint could not be saved: %s", error)
