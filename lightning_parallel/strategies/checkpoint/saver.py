"""Saves and removes the checkpoints of one run, in either form, now or while training goes on."""

from __future__ import annotations

import copy
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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
from lightning_parallel.checkpoint.folder import Manifest, Offer, Shares, shared_out
from lightning_parallel.checkpoint.plain import TENSORS, NotPlain, encoded, joined
from lightning_parallel.mesh import Axis
from lightning_parallel.strategies.checkpoint.reading import MODEL, CheckpointOptions, is_divided
from lightning_parallel.strategies.lightning_package import VERSION as LIGHTNING
from lightning_parallel.strategies.lightning_package import CheckpointIO, ModelCheckpoint, Trainer
from lightning_parallel.strategies.ranks.agreement import gather_objects, run_or_raise_on_all
from lightning_parallel.techniques.tools.global_shard import GlobalShard
from lightning_parallel.techniques.tools.shards import boxes, local

log = logging.getLogger(__name__)
Act = Callable[[], None]


@dataclass(frozen=True)
class Source:
    """Facts about a save that the checkpoint itself does not tell.

    Attributes:
        layout: the sizes of the mesh's axes.
        tied: of names of parameters that are another one, the name of that.
        model: the model's tensors as they were before hooks saw them.
    """

    layout: Mapping[Axis, int]
    tied: Mapping[str, str]
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Save:
    """One rank's part of a save. Nothing in it changes while training goes on.

    Attributes:
        target: where the checkpoint is to lie.
        rank: this one.
        own: the boxes that it writes.
        shares: what all ranks write.
        values: everything that is no tensor.
        head: the manifest as far as it is known.
    """

    target: Path
    rank: int
    own: Mapping[str, Tensor]
    shares: Shares
    values: Any
    head: Manifest

    def run(self, group: dist.ProcessGroup) -> None:
        """Writes, and commits when all ranks have written. Where one fails nothing is left but what was there."""
        with ExitStack() as stack:  # removes what a failure leaves

            def begin() -> Path | None:
                if self.rank != 0:
                    return None
                made = stack.enter_context(commit.writing(self.target))
                made.mkdir()
                needed, free = sum(table.nbytes for table in self.shares.tensors.values()), shutil.disk_usage(made).free
                if free < needed:
                    raise OSError(
                        f"{self.target} needs {needed:,} bytes, and {free:,} are free there; make room for it"
                    )
                return made

            made = gather_objects(run_or_raise_on_all(begin, f"make a folder for {self.target}", group), group)[0]
            assert made is not None
            what = f"write its part of {self.target}"
            written = run_or_raise_on_all(folder.write_share, what, group, made, self.rank, self.own)
            files = {name: content for each in gather_objects(written, group) for name, content in each.items()}

            def finish() -> None:
                if self.rank == 0:
                    folder.finish(made, self.values, self.head, files)
                    commit.commit(made, self.target)

            run_or_raise_on_all(finish, f"commit {self.target}", group)


def prepared(
    checkpoint: Mapping[str, Any], target: Path, source: Source, group: dist.ProcessGroup, copies: bool
) -> Save:
    """This rank's part of a save. All ranks must call.

    Args:
        checkpoint: what Lightning made of what each rank holds; hooks may have changed it.
        target: the same on all ranks.
        source: where it comes from.
        group: all ranks.
        copies: whether what is written is copied to the host's memory now, because training goes on.

    Raises:
        TypeError: a value that is no plain data, named by the keys that lead to it.
    """
    rank = group.rank()
    values, tensors = run_or_raise_on_all(_encoded, f"write down the checkpoint {target}", group, checkpoint)
    model = {*map(id, source.model.values())}  # a hook may have put it elsewhere, as Lightning's `WeightAveraging` does
    tables = [(key, table) for key, table in checkpoint.items() if isinstance(table, Mapping)]
    divided = {joined((key, name)) for key, table in tables for name, each in table.items() if id(each) in model}
    divided |= {name for name in tensors if is_divided(name)}
    tensors = {name: it for name, it in tensors.items() if rank == 0 or name in divided or isinstance(it, DTensor)}
    held: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for name, tensor in tensors.items():
        part = local(tensor)
        found = {} if tensor.is_meta else {offset: part[here] for here, offset in boxes(tensor)}  # on meta: of others
        held[name] = {offset: box for offset, box in found.items() if box.numel()}
    shapes = {name: (str(name_of(tensor.dtype)), tuple(tensor.shape)) for name, tensor in tensors.items()}
    spans = {name: [(offset, tuple(box.shape)) for offset, box in found.items()] for name, found in held.items()}
    # of parameters that are another one, unless a hook has put something else under one of the names
    own_model: Mapping[str, Any] = checkpoint.get(MODEL, {})
    untouched = {name for name, each in own_model.items() if each is source.model.get(name)}
    tied = {name: other for name, other in source.tied.items() if {name, other} <= untouched}
    same = {joined((MODEL, name)): joined((MODEL, other)) for name, other in tied.items()}
    offers: list[Any] | None = [None] * group.size() if rank == 0 else None
    # rank 0 plans who writes which box of each tensor, and tells all
    dist.gather_object(Offer(shapes, spans, same), offers, group=group)
    agreed = [run_or_raise_on_all(lambda: shared_out(offers) if offers else None, f"plan {target}", group)]
    dist.broadcast_object_list(agreed, group=group)
    shares = agreed[0]
    assert shares is not None
    own = folder.share_of(rank, shares, lambda name, offset, shape: _within(held[name], offset, shape))
    if copies:
        # optimizers change parameters in place while the copy is written
        own = {name: box.to("cpu", copy=True) for name, box in own.items()}
    versions = {"torch": str(torch.__version__), "lightning": LIGHTNING}
    step, holds = int(checkpoint.get("global_step", 0)), tuple(checkpoint)
    head = Manifest(step, dict[str, int](source.layout.items()), versions, shares.tensors, shares.same, {}, holds)
    return Save(target, rank, own, shares, values, head)


def _encoded(checkpoint: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    try:
        values, tensors = encoded(dict(checkpoint), (*TENSORS, GlobalShard))
    except NotPlain as error:
        remedy = (
            "save it as numbers, strings, lists, dictionaries or tensors, or pass checkpoint='full' to the strategy, "
        )
        remedy += "which pickles it"
        if len(error.path) > 1 and error.path[0] in ("hyper_parameters", "datamodule_hyper_parameters"):
            remedy = f"leave it out with save_hyperparameters(ignore=[{error.path[1]!r}])"
        raise TypeError(f"{error}: a sharded checkpoint holds no code; {remedy}") from None
    for name, tensor in tensors.items():
        if name_of(tensor.dtype) is None:
            raise TypeError(
                f"{name} is of {tensor.dtype}, which safetensors does not know; convert it in on_save_checkpoint, or "
                "pass checkpoint='full' to the strategy"
            )
    return values, tensors


def _within(held: Mapping[tuple[int, ...], Tensor], offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A box that lies within one of those that this rank holds."""
    for first, box in held.items():
        here = [start - before for start, before in zip(offset, first, strict=True)]
        ends = [start + size for start, size in zip(here, shape, strict=True)]
        if all(start >= 0 for start in here) and all(end <= size for end, size in zip(ends, box.shape, strict=True)):
            return box[tuple(slice(start, end) for start, end in zip(here, ends, strict=True))]
    raise AssertionError(f"{offset}, {shape} is no box of this rank")


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

    def afterwards(self, act: Callable[..., None], *args: Any) -> None:
        """Act at once if nothing is being saved, else when it is saved, and never if that fails or has failed."""
        with self._lock:
            if self._acts:
                self._acts.append(partial(act, *args))
                return
        if not self.failed:
            act(*args)

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

    def link(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        """Rank 0 makes a link to a checkpoint, once that is saved, in the place of one that was there."""
        if self._host.rank() == 0 and os.path.abspath(filepath) != os.path.abspath(linkpath):
            self.afterwards(commit.link, Path(filepath), Path(linkpath))
        self._remove_linked()
        trainer.strategy.barrier()

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
