"""Saves and removes the checkpoints of one run, in either form, now or while training goes on."""

from __future__ import annotations

import copy
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_parallel.checkpoint import commit
from lightning_parallel.strategies.checkpoint.options import CheckpointOptions
from lightning_parallel.strategies.checkpoint.sharded import Source, prepared
from lightning_parallel.strategies.lightning_package import CheckpointIO, ModelCheckpoint
from lightning_parallel.strategies.ranks.agreement import gather_objects, run_or_raise_on_all

log = logging.getLogger(__name__)

Act = Callable[[], None]


class Background:
    """Runs saves in a thread, one at a time, and then what follows each of them.

    The thread is a daemon and no `ThreadPoolExecutor`, whose threads Python joins as it ends: a process whose run has
    failed must not wait for ranks that will not come.

    Attributes:
        failed: whether the last save failed, and nobody has been told yet.
    """

    def __init__(self) -> None:
        self.failed = False
        self._lock, self._acts = Lock(), deque[Act]()  # the first one runs
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, save: Act) -> None:
        """Begin a save once the one before it is over; raise the failure of that."""
        self.wait()
        self._acts.append(save)
        self._thread = Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def afterwards(self, act: Act) -> None:
        """Act at once if nothing is being saved, else when it is saved, and never if that fails or has failed."""
        with self._lock:
            if self._acts:
                self._acts.append(act)
                return
        if not self.failed:
            act()

    def wait(self) -> None:
        """Return when nothing is being saved; raise the failure of the last save, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure, self.failed = self._failure, None, False
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while self._acts:
            try:
                self._acts[0]()
            except BaseException as error:
                # before nothing is being saved: `afterwards` asks in the other order
                self._failure, self.failed = error, True
                with self._lock:
                    self._acts.clear()
                return
            with self._lock:
                self._acts.popleft()


class Saver(Background):
    """Saves and removes checkpoints. `save`, `link` and `finish` are collective over all ranks.

    Args:
        options: the user's.
        io: writes the full form.
        host: all ranks.
        background: all ranks too, for saves that go on while training does; None where none does.

    Attributes:
        model: the model's tensors as Lightning got them for the checkpoint that it is putting together.
        callbacks: the trainer's, which say what is removed.
        steps_since_read: training steps begun since a checkpoint was read.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        io: CheckpointIO,
        host: dist.ProcessGroup,
        background: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self._options, self._io = options, io
        self._host, self._group = host, background
        self.model: dict[str, Any] = {}
        self.callbacks: Sequence[ModelCheckpoint] = ()
        self._linked: list[Any] = []  # checkpoints to remove as soon as the link to the last one leads to another
        self._read: Any = None  # the checkpoint that was read last
        self.steps_since_read = 0

    # ---------------------------------------------------------------- saving

    def save(
        self, checkpoint: dict[str, Any], filepath: Any, source: Source, storage_options: Any, waits: bool
    ) -> None:
        """Save what Lightning has put together; the path is rank 0's on all ranks.

        Args:
            checkpoint: see Lightning.
            filepath: see Lightning.
            source: where it comes from, but for the model's tensors.
            storage_options: see Lightning.
            waits: whether it is there when this returns, also where saves go on in the background.
        """
        self._remove_linked()
        target = gather_objects(filepath, self._host)[0]
        source, self.model = replace(source, model=self.model), {}
        run: Callable[[dist.ProcessGroup], None]
        if self._options.form == "sharded":
            if storage_options is not None or "://" in str(target):
                raise ValueError(
                    f"{target} is no local path, and checkpoint='sharded' writes to these only; use 'full'"
                )
            run = prepared(checkpoint, Path(target), source, self._host, copies=self._group is not None).run
        else:
            writes = self._host.rank() == 0
            if self._group is not None and writes:
                checkpoint = copy.deepcopy(checkpoint)  # what is on the host already is the model's own memory

            def write() -> None:
                if writes:
                    self._io.save_checkpoint(checkpoint, target, storage_options=storage_options)

            run = partial(run_or_raise_on_all, write, f"write the checkpoint {target}")
        if self._group is None:
            run(self._host)
            return
        self.begin(partial(run, self._group))
        if waits:
            self.wait()

    def link(self, filepath: str, linkpath: str) -> None:
        """Rank 0 makes a link to a checkpoint, once that is saved, in the place of one that was there."""
        if self._host.rank() == 0 and os.path.abspath(filepath) != os.path.abspath(linkpath):
            self.afterwards(partial(commit.link, Path(filepath), Path(linkpath)))
        self._remove_linked()

    def finish(self, failing: bool) -> None:
        """The run ends: as `wait`, but where it ends by another failure this one is only told."""
        if not failing:
            self._remove_linked()
        try:
            self.wait()
        except Exception as error:
            if not failing:
                raise
            log.error("The last checkpoint could not be saved: %s", error)

    def fail(self) -> NoReturn:
        """Raise on all ranks what went wrong on any of them."""
        self.wait()
        raise RuntimeError("another rank could not finish what follows a save; its message says why")

    # ---------------------------------------------------------------- removing

    def remove(self, filepath: Any) -> None:
        """Rank 0 removes a checkpoint, after what is being saved, and after its link is put on another.

        Lightning removes step 1, and only then makes the link to step 2: between the two there would be none.
        """
        if self._host.rank() != 0:
            return
        folders = [Path(callback.dirpath) for callback in self.callbacks if callback.dirpath is not None]
        path = Path(filepath).absolute()
        real = path.parent.resolve() / path.name if path.is_symlink() else path.resolve()
        begins = any(folder.absolute() in path.parents for folder in folders)
        if begins and not any(folder.resolve() in real.parents for folder in folders):  # as `run/../other`
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
            self.afterwards(partial(self._remove, filepath))

    def _remove_linked(self) -> None:
        for filepath in self._linked:
            self.afterwards(partial(self._remove, filepath))
        self._linked = []

    def _remove(self, filepath: Any) -> None:
        if "://" not in str(filepath) and Path(filepath).is_dir():
            commit.remove(Path(filepath))
        else:
            self._io.remove_checkpoint(filepath)

    # ---------------------------------------------------------------- what was read

    def wait_to_read(self, path: Any) -> None:
        """As `wait`: a checkpoint is about to be read, perhaps the one that is being saved."""
        self._read, self.steps_since_read = path, 0
        self.wait()

    def said_of_read(self, error: BaseException) -> str:
        """Names the checkpoint behind an error until the first training step is done, such as a wrong type in it."""
        if self._read is None or self.steps_since_read > 1 or str(self._read) in str(error):
            return ""
        return f"This happened before the first training step from {self._read} was done; its values may be the cause"
