"""First batches as steps get them, without an effect on what comes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_parallel.strategies.data.divided_loaders import DividedLoader
from lightning_parallel.strategies.data.loaders import undivided
from lightning_parallel.strategies.data.randomness import RandomState, RankRandomness
from lightning_parallel.strategies.data.samplers import DealtBatches, DividedSampler, checksum
from lightning_parallel.strategies.data.unmoved import unmoved
from lightning_parallel.strategies.lightning_package import Trainer
from lightning_parallel.strategies.logged.kept.values import KeptValues
from lightning_parallel.strategies.ranks.agreement import together
from lightning_parallel.strategies.trainer import lightnings

HOST = torch.device("cpu")


def first_batch(trainer: Trainer, combined: Any) -> Any:
    """The first batch of a loop's loaders, on the host, as the step gets it.

    Args:
        trainer: whose loop it is.
        combined: the loop's loaders.

    Raises:
        TypeError: a loader that can be read only once.
        ValueError: one that yields nothing.
    """
    parts = [_first_of_loader(loader) for loader in read_together(combined, 0)]
    batch = parts[0] if lightnings.reads_in_turn(combined) else lightnings.as_given(combined, parts)
    with untouched([], trainer):
        return _as_given_to_steps(trainer, batch, HOST, 0)


def of_rank_zero(batch: Any, host: dist.ProcessGroup) -> Any:
    """A copy of the batch of rank 0; each rank's own where that cannot be sent. Collective over `host`, all ranks.

    Args:
        batch: what this rank got, on the host.
        host: all ranks.
    """
    sent: list[Any] = [None]
    if host.rank() == 0:
        with suppress(Exception):
            alone = pytree.tree_map_only(Tensor, Tensor.clone, batch)  # a view would bring all that it is a part of
            sent = [pickle.dumps(alone)]
    dist.broadcast_object_list(sent, 0, group=host)
    if sent[0] is None:
        return batch
    return together(lambda: pickle.loads(sent[0]), "read the first batch of rank 0", host)


def _as_given_to_steps(trainer: Trainer, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
    batch = trainer.precision_plugin.convert_input(batch)
    return lightnings.transferred(trainer.lightning_module, batch, device, dataloader_idx)


def read_together(combined: Any, dataloader_idx: int) -> list[Any]:
    """The loaders of which a batch is made."""
    loaders = combined.flattened
    return [loaders[dataloader_idx]] if lightnings.reads_in_turn(combined) else loaders


# ---------------------------------------------------------------- read before a pass


def _first_of_loader(loader: Any) -> Any:
    own = undivided(loader)
    if not isinstance(own, DataLoader):
        return _begun(own, 1)[0]
    samples = _first_samples(loader, own)
    with unmoved([own.collate_fn]), RandomState.preserved():
        return own.collate_fn(samples)


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
        return _begun(divided.source, own.batch_size or 1)
    batches = own.sampler if own.batch_sampler is None else own.batch_sampler
    return _begun(batches if divided is None else divided.source, 1)[0]


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
            f"a {type(items).__name__} can be read only once, but a pipeline analyzes a step before the first batch; "
            "give a loader whose __iter__ starts anew, and let it open there what it reads from"
        )
    if not first:
        raise ValueError(
            f"a {type(items).__name__} yields nothing, but a pipeline analyzes a step before the first batch; give a "
            "loader that has samples whenever it is read"
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
