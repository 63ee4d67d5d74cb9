"""First batches as steps get them, without an effect on what comes, and where samples are in them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_parallel.strategies.data.left_out import Versions
from lightning_parallel.strategies.data.loaders import DividedLoader, undivided
from lightning_parallel.strategies.data.randomness import RandomState, RankRandomness
from lightning_parallel.strategies.data.samplers import DealtBatches, DividedSampler, checksum
from lightning_parallel.strategies.data.unmoved import unmoved
from lightning_parallel.strategies.lightning_package import Trainer
from lightning_parallel.strategies.logged.kept.values import KeptValues
from lightning_parallel.strategies.ranks.agreement import gather_objects, together
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.techniques.tools.microbatches import SEVERAL, Layout, layout_of
from lightning_parallel.techniques.tools.telling import warn

HOST = torch.device("cpu")


def first_batch(trainer: Trainer, combined: Any, ahead: Sequence[Any], divides: bool) -> tuple[Any, Layout]:
    """The first batch of a loop's loaders, on the host, as the step gets it, and where its samples are.

    Args:
        trainer: whose loop it is.
        combined: the loop's loaders.
        ahead: batches that Lightning has read for the pass that begins; where there are any, nothing is read.
        divides: whether batches will be divided; if not, nobody looks where samples are.

    Raises:
        TypeError: a loader that can be read only once.
        ValueError: one that yields nothing.
    """
    loaders = read_together(combined, 0)
    if not ahead:
        return seen(trainer, combined, [_first_versions(loader, divides) for loader in loaders], HOST, 0)
    if (versions := versions_of(loaders)) is not None:
        return seen(trainer, combined, versions, HOST, 0)
    return _as_given_to_steps(trainer, copy.deepcopy(ahead[0]), HOST, 0), None


def of_rank_zero(batch: Any, layout: Layout, host: dist.ProcessGroup) -> tuple[Any, Layout]:
    """The first batch that rank 0 got, and its layout; each rank's own where that cannot be sent. All ranks must call.

    Args:
        batch: what this rank got, on the host.
        layout: where its samples are.
        host: all ranks.
    """
    sent: list[Any] = [None]
    if host.rank() == 0:
        with suppress(Exception):
            alone = pytree.tree_map_only(Tensor, Tensor.clone, batch)  # a view would bring all that it is a part of
            sent = [pickle.dumps((alone, layout))]
    dist.broadcast_object_list(sent, 0, group=host)
    if sent[0] is None:
        return batch, layout
    first: tuple[Any, Layout] = together(lambda: pickle.loads(sent[0]), "read the first batch of rank 0", host)
    return first


def seen(
    trainer: Trainer, combined: Any, versions: Sequence[Versions], device: torch.device, dataloader_idx: int
) -> tuple[Any, Layout]:
    """A batch of versions of those of several loaders as the step gets it, and where its samples are, if that shows.

    Args:
        trainer: whose hooks prepare it.
        combined: the loop's loaders.
        versions: of each loader's batch.
        device: to which hooks bring it.
        dataloader_idx: which loader it is, where they are read one after the other.
    """

    def prepared(parts: Sequence[Any]) -> Any:
        batch = parts[0] if lightnings.reads_in_turn(combined) else lightnings.as_given(combined, list(parts))
        with untouched([], trainer, device):
            return _as_given_to_steps(trainer, batch, device, dataloader_idx)

    whole, *others = zip(*(each.made for each in versions), strict=False)
    batch = prepared(whole)
    if not others or len({each.size for each in versions}) > 1:
        return batch, None
    try:
        return batch, layout_of(batch, list(map(prepared, others)), versions[0].size)
    except Exception as error:  # hooks may need all samples
        tell_unseen(f"{type(error).__name__}: {error}")
        return batch, None


def tell_unseen(fault: str) -> None:
    """Warns once a batch could not be made to see where its samples are."""
    warn(
        f"Where samples are in a batch could not be seen, for it could not be made without one of them ({fault}): "
        "microbatches take as samples what most of its tensors have in their first dimension. Let collate_fn and "
        "the hooks for batches take any number of samples"
    )


def agreed(layout: Layout, host: dist.ProcessGroup) -> Layout:
    """What all ranks saw, or what cannot be divided on one; else None. All ranks must call."""
    said = gather_objects(layout, host)
    if all(theirs == layout for theirs in said):
        return layout
    return next((theirs for theirs in said if _has_several(theirs)), None)


def _has_several(layout: Layout) -> bool:
    within: Any = layout.values() if isinstance(layout, dict) else layout if isinstance(layout, tuple) else ()
    return layout == SEVERAL or any(map(_has_several, within))


def _as_given_to_steps(trainer: Trainer, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
    batch = trainer.precision_plugin.convert_input(batch)
    return lightnings.transferred(trainer.lightning_module, batch, device, dataloader_idx)


def read_together(combined: Any, dataloader_idx: int) -> list[Any]:
    """The loaders of which a batch is made."""
    loaders = combined.flattened
    return [loaders[dataloader_idx]] if lightnings.reads_in_turn(combined) else loaders


def versions_of(loaders: Iterable[Any]) -> list[Versions] | None:
    """Takes the versions of the first batch that each loader yielded; None where one has none."""
    found = [loader.take_versions() if isinstance(loader, DividedLoader) else None for loader in loaders]
    versions = [each for each in found if each is not None and not each.fault]
    for fault in {each.fault for each in found if each is not None and each.fault}:
        tell_unseen(fault)
    return versions if len(versions) == len(found) else None


# ---------------------------------------------------------------- read before a pass


def _first_versions(loader: Any, divides: bool) -> Versions:
    own = undivided(loader)
    if not isinstance(own, DataLoader):
        return Versions(_begun(own, 1))
    samples = _first_samples(loader, own)
    if own.batch_sampler is None:  # it is a batch, though it may be a list
        return Versions([own.collate_fn(samples)])
    several = divides and isinstance(samples, list) and len(samples) > 1
    versions = Versions.of(samples, own.collate_fn) if several else Versions([])
    if versions.fault:
        tell_unseen(versions.fault)
    return versions if versions.made else Versions([own.collate_fn(samples)])


def _first_samples(loader: Any, own: DataLoader[Any]) -> Any:
    dataset: Any = own.dataset
    if isinstance(dataset, IterableDataset):
        return _begun(dataset, 1)[0] if own.batch_sampler is None else _begun(dataset, own.batch_size or 1)
    indices = _first_indices(loader, own)
    if not isinstance(indices, (list, tuple)) or own.batch_sampler is None:
        return dataset[indices]
    fetch_many = getattr(dataset, "__getitems__", None)
    return fetch_many(list(indices)) if callable(fetch_many) else [dataset[index] for index in indices]


def _first_indices(loader: Any, own: DataLoader[Any]) -> Any:
    divided: DividedSampler | None = loader.divided if isinstance(loader, DividedLoader) else None
    if divided is not None and not isinstance(divided, DealtBatches):
        return _begun(divided.sampler, own.batch_size or 1)
    batches = own.sampler if own.batch_sampler is None else own.batch_sampler
    return _begun(batches if divided is None else divided.sampler, 1)[0]


def _begun(items: Any, count: int) -> list[Any]:
    """The first of some items that come again when they are begun again, as a pass does that follows.

    Raises:
        TypeError: others come, as of an open file: those would be missing in the pass.
        ValueError: there are none.
    """
    is_pass = isinstance(items, Iterator) and not isinstance(items, (Dataset, Sampler))
    first, again = ([], [None]) if is_pass else [_first_of(items, count) for _ in range(2)]
    if not _same(first, again):
        raise TypeError(
            f"a {type(items).__name__} can be read only once, but a pipeline looks at one batch before the run; "
            "give a loader whose __iter__ starts anew, and let it open there what it reads from"
        )
    if not first:
        raise ValueError(
            f"a {type(items).__name__} yields nothing, but a pipeline looks at one batch before the run; give a loader "
            "that has samples whenever it is read"
        )
    return first


def _first_of(items: Any, count: int) -> list[Any]:
    with unmoved([items]), RandomState.preserved():
        return list(islice(iter(items), count))


def _same(first: Any, again: Any) -> bool:
    (leaves, structure), (others, its) = pytree.tree_flatten(first), pytree.tree_flatten(again)
    return structure == its and all(map(_same_leaf, leaves, others))


def _same_leaf(leaf: Any, other: Any) -> bool:
    if leaf is other:
        return True
    if isinstance(leaf, (Tensor, np.ndarray)):
        return checksum(leaf) == checksum(other)
    with suppress(Exception):  # of what cannot be written nobody knows
        return pickle.dumps(leaf) == pickle.dumps(other)
    return False


@contextmanager
def untouched(loaders: Iterable[Any], trainer: Trainer, device: torch.device = HOST) -> Iterator[None]:
    """Afterwards random states, and what users made to read data, stand where they stood."""
    module: Any = trainer.lightning_module
    drawn, kept = RankRandomness.now(device), KeptValues(module)
    with unmoved([*loaders, getattr(trainer, "datamodule", None)]):
        try:
            yield
        finally:
            kept.undo()
            drawn.restore(device)
