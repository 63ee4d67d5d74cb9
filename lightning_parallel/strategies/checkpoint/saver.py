"""Saving and removal of the checkpoints of one run, full or sharded, at once or in the background of training."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.checkpoint import commit, folder
from lightning_parallel.checkpoint.files import name_of
from lightning_parallel.checkpoint.folder import Manifest, Offer, plan_writes
from lightning_parallel.checkpoint.plain import TENSORS, NotPlain, encoded, joined
from lightning_parallel.mesh import Axis
from lightning_parallel.strategies.checkpoint.reading import MODEL, CheckpointOptions, is_divided
from lightning_parallel.strategies.lightning_package import VERSION as LIGHTNING
from lightning_parallel.strategies.lightning_package import CheckpointIO, ModelCheckpoint, Trainer
from lightning_parallel.strategies.ranks.agreement import gather_objects, run_or_raise_on_all
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from lightning_parallel.techniques.tools.shards import boxes, local

log = logging.getLogger(__name__)


class Save:
    """One rank's part of a sharded save. Nothing in it changes while training continues.

    The constructor plans, on rank 0, which rank writes which boxes of which tensors. Collective over `group`.

    Args:
        checkpoint: Lightning's checkpoint with the tensors of this rank; hooks may have changed it.
        target: path of the checkpoint, the same on all ranks.
        layout: sizes of the mesh's axes.
        tied: from the name of a tied parameter to the name under which it is saved.
        model: the model's tensors by name, before hooks could change them.
        group: group of all ranks.
        copies: whether to copy the tensors to host memory now, because training continues while they are written.

    Raises:
        TypeError: a value is no plain data; the error names the keys that lead to it.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        target: Path,
        layout: Mapping[Axis, int],
        tied: Mapping[str, str],
        model: Mapping[str, Any],
        group: dist.ProcessGroup,
        copies: bool,
    ) -> None:
        rank = group.rank()
        values, tensors = run_or_raise_on_all(_encoded, f"serialize the checkpoint {target}", group, checkpoint)
        ids = {*map(id, model.values())}  # a hook may have moved these to another key, e.g. `WeightAveraging`
        tables = [(key, table) for key, table in checkpoint.items() if isinstance(table, Mapping)]
        sharded = {joined((key, name)) for key, table in tables for name, each in table.items() if id(each) in ids}
        sharded |= {name for name in tensors if is_divided(name)}
        tensors = {name: it for name, it in tensors.items() if rank == 0 or name in sharded or isinstance(it, DTensor)}
        held: dict[str, dict[tuple[int, ...], Tensor]] = {}  # by name: this rank's boxes, by offset in the full tensor
        for name, tensor in tensors.items():
            shard = local(tensor)
            # a tensor on meta is another rank's
            views = {} if tensor.is_meta else {offset: shard[here] for here, offset in boxes(tensor)}
            held[name] = {offset: box for offset, box in views.items() if box.numel()}
        shapes = {name: (str(name_of(tensor.dtype)), tuple(tensor.shape)) for name, tensor in tensors.items()}
        spans = {name: [(offset, tuple(box.shape)) for offset, box in views.items()] for name, views in held.items()}
        # tied parameters are written once, unless a hook has put another tensor under one of their names
        saved_model: Mapping[str, Any] = checkpoint.get(MODEL, {})
        untouched = {name for name, each in saved_model.items() if each is model.get(name)}
        pairs = [(name, other) for name, other in tied.items() if {name, other} <= untouched]
        same = {joined((MODEL, name)): joined((MODEL, other)) for name, other in pairs}
        offers: list[Any] | None = [None] * group.size() if rank == 0 else None
        # rank 0 plans which rank writes which box of each tensor, and broadcasts the plan
        dist.gather_object(Offer(shapes, spans, same), offers, group=group)
        plans = [run_or_raise_on_all(lambda: plan_writes(offers) if offers else None, f"plan {target}", group)]
        dist.broadcast_object_list(plans, group=group)
        assert plans[0] is not None
        tables_to_write, same = plans[0]
        assigned = folder.share_of(
            rank, tables_to_write, lambda name, offset, shape: _within(held[name], offset, shape)
        )
        if copies:
            # optimizers will change parameters in place while the boxes are written
            assigned = {name: box.to("cpu", copy=True) for name, box in assigned.items()}
        versions = {"torch": str(torch.__version__), "lightning": LIGHTNING}
        step, holds = int(checkpoint.get("global_step", 0)), tuple(checkpoint)
        self._target, self._rank, self._values, self._assigned = target, rank, values, assigned
        # the manifest, without the hashes of files that are yet to be written
        self._head = Manifest(step, dict[str, int](layout.items()), versions, tables_to_write, same, {}, holds)

    def run(self, group: dist.ProcessGroup) -> None:
        """Write, and commit when all ranks have written; a failure on one leaves only what was there. Collective."""
        target = self._target
        with ExitStack() as stack:  # removes the temporary folder after a failure

            def begin() -> Path | None:
                if self._rank != 0:
                    return None
                path = stack.enter_context(commit.writing(target))
                path.mkdir()
                needed, free = sum(table.nbytes for table in self._head.tensors.values()), shutil.disk_usage(path).free
                if free < needed:
                    raise OSError(f"{target} needs {needed:,} bytes, but only {free:,} are free; make room there")
                return path

            temporary = gather_objects(run_or_raise_on_all(begin, f"make a folder for {target}", group), group)[0]
            assert temporary is not None
            what = f"write its shards of {target}"
            written = run_or_raise_on_all(folder.write_share, what, group, temporary, self._rank, self._assigned)
            files = {name: content for of_rank in gather_objects(written, group) for name, content in of_rank.items()}

            def finish() -> None:
                if self._rank == 0:
                    folder.finish(temporary, self._values, self._head, files)
                    commit.commit(temporary, target)

            run_or_raise_on_all(finish, f"commit {target}", group)


def _encoded(checkpoint: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    try:
        values, tensors = encoded(dict(checkpoint), (*TENSORS, GlobalShard))
    except NotPlain as error:
        remedy = "save it as numbers, strings, lists, dictionaries or tensors, or pass checkpoint='full' to the "
        remedy += "strategy, which pickles it"
        if len(error.path) > 1 and error.path[0] in ("hyper_parameters", "datamodule_hyper_parameters"):
            remedy = f"leave it out with save_hyperparameters(ignore=[{error.path[1]!r}])"
        raise TypeError(f"{error}: a sharded checkpoint holds no code; {remedy}") from None
    for name, tensor in tensors.items():
        if name_of(tensor.dtype) is None:
            raise TypeError(
                f"{name} is {tensor.dtype}, which safetensors does not support; convert it in on_save_checkpoint, or "
                "pass checkpoint='full' to the strategy"
            )
    return values, tensors


def _within(held: Mapping[tuple[int, ...], Tensor], offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Return a box as a view of the box of this rank that contains it."""
    for first, box in held.items():
        here = [start - before for start, before in zip(offset, first, strict=True)]
        ends = [start + size for start, size in zip(here, shape, strict=True)]
        if all(start >= 0 for start in here) and all(end <= size for end, size in zip(ends, box.shape, strict=True)):
            return box[tuple(slice(start, end) for start, end in zip(here, ends, strict=True))]
    raise AssertionError(f"{offset}, {shape} is no box of this rank")


class Saver:
    """Saves and removes checkpoints. `save`, `link` and `finish` are collective over all ranks.

    Saves in the background run in a thread, one at a time, each followed by the actions that wait for it.

    Args:
        options: the user's options.
        io: writer of the full form.
        host: group of all ranks.
        background: another group of all ranks for saves in the background; None if there are none.

    Attributes:
        model: the model's tensors that Lightning got for the checkpoint that it is making at the moment.
        callbacks: the trainer's `ModelCheckpoint`s, which decide what is removed.
        failure: of the last save in the background, until `wait` raises it; else None.
        steps_since_read: number of training steps begun since a checkpoint was read.
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
        self.model: dict[str, Any] = {}
        self.callbacks: Sequence[ModelCheckpoint] = ()
        self._linked: list[Any] = []  # checkpoints to remove as soon as the link to the last one is moved
        self._read: Any = None  # path of the checkpoint that was read last
        self.steps_since_read = 0
        self.failure: BaseException | None = None
        self._lock, self._acts = Lock(), deque[Callable[[], None]]()  # the first one is running
        self._thread: Thread | None = None

    # ---------------------------------------------------------------- saving

    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: Any,
        layout: Mapping[Axis, int],
        tied: Mapping[str, str],
        storage_options: Any,
        waits: bool,
    ) -> None:
        """Save Lightning's checkpoint to rank 0's path.

        Args:
            checkpoint: see Lightning.
            filepath: see Lightning; rank 0's counts.
            layout: see `Save`.
            tied: see `Save`.
            storage_options: see Lightning.
            waits: whether to return only when the checkpoint is saved, even if saves run in the background.
        """
        self._remove_linked()
        target = gather_objects(filepath, self._host)[0]
        model, self.model = self.model, {}
        run: Callable[[dist.ProcessGroup], None]
        if self._options.form == "sharded":
            if storage_options is not None or "://" in str(target):
                raise ValueError(
                    f"{target} is not a local path, but checkpoint='sharded' writes only to these; use 'full'"
                )
            copies = self._group is not None
            run = Save(checkpoint, Path(target), layout, tied, model, self._host, copies).run
        else:
            writes = self._host.rank() == 0
            if self._group is not None and writes:
                checkpoint = copy.deepcopy(checkpoint)  # tensors of a model on the host share the model's memory

            def write() -> None:
                if writes:
                    self._io.save_checkpoint(checkpoint, target, storage_options=storage_options)

            run = partial(run_or_raise_on_all, write, f"write the checkpoint {target}")
        if self._group is None:
            run(self._host)
            return
        self.wait()  # for the previous save; raises its failure
        self._acts.append(partial(run, self._group))
        # A daemon, and not of a `ThreadPoolExecutor`, whose threads Python joins at exit: a process whose run has
        # failed must not wait for ranks that will not take part.
        self._thread = Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()
        if waits:
            self.wait()

    def link(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        """Let rank 0 link `linkpath` to a checkpoint once it is saved, replacing an old link. Collective."""
        if self._host.rank() == 0 and os.path.abspath(filepath) != os.path.abspath(linkpath):
            self.afterwards(commit.link, Path(filepath), Path(linkpath))
        self._remove_linked()
        trainer.strategy.barrier()

    def finish(self, failing: bool) -> None:
        """Wait for the last save at the end of a run; only log its failure if the run ends by another one."""
        if not failing:
            self._remove_linked()
        try:
            self.wait()
        except Exception as error:
            if not failing:
                raise
            log.error("The last checkpoint could not be saved: %s", error)

    # ---------------------------------------------------------------- in the background

    def afterwards(self, act: Callable[..., None], *args: Any) -> None:
        """Call `act` now if nothing is being saved, else after the save; never if the save fails or has failed."""
        with self._lock:
            if self._acts:
                self._acts.append(partial(act, *args))
                return
        if self.failure is None:
            act(*args)

    def wait(self) -> None:
        """Wait until nothing is being saved; raise the failure of the last save, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while self._acts:
            try:
                self._acts[0]()
            except BaseException as error:
                self.failure = error  # before the queue is empty: `afterwards` reads them in the other order
                with self._lock:
                    self._acts.clear()
                return
            with self._lock:
                self._acts.popleft()

    # ---------------------------------------------------------------- removing

    def remove(self, filepath: Any) -> None:
        """Remove a checkpoint on rank 0, after the present save, and after the link to it has been moved.

        Lightning removes step 1 and then links to step 2: in between, the link would lead nowhere.
        """
        if self._host.rank() != 0:
            return
        folders = [Path(callback.dirpath) for callback in self.callbacks if callback.dirpath is not None]
        path = Path(filepath).absolute()
        real = path.parent.resolve() / path.name if path.is_symlink() else path.resolve()
        looks_inside = any(folder.absolute() in path.parents for folder in folders)
        if looks_inside and not any(folder.resolve() in real.parents for folder in folders):  # e.g. `run/../other`
            log.warning(
                "%s is not removed: the checkpoint from which this run resumes names it, but it lies outside the "
                "folder of the ModelCheckpoint. If it is no longer needed, remove it by hand",
                filepath,
            )
            return
        links = [callback.last_model_path for callback in self.callbacks if callback.save_last == "link"]
        target = None if os.path.islink(filepath) else os.path.realpath(filepath)
        if any(os.path.realpath(link) == target for link in links):
            self._linked.append(filepath)
        else:
            self.afterwards(self._remove, filepath)

    def _remove_linked(self) -> None:
        for filepath in self._linked:
            self.afterwards(self._remove, filepath)
        self._linked = []

    def _remove(self, filepath: Any) -> None:
        if "://" not in str(filepath) and Path(filepath).is_dir():
            commit.remove(Path(filepath))
        else:
            self._io.remove_checkpoint(filepath)

    # ---------------------------------------------------------------- reading

    def wait_to_read(self, path: Any) -> None:
        """Wait before a checkpoint is read, as it may be the one that is being saved; remember its path."""
        self._read, self.steps_since_read = path, 0
        self.wait()

    def checkpoint_note(self, error: BaseException) -> str:
        """Return a note that names the checkpoint as a possible cause of an error, until a training step is done."""
        if self._read is None or self.steps_since_read > 1 or str(self._read) in str(error):
            return ""
        return f"No training step was completed since {self._read} was loaded; its values may be the cause"
