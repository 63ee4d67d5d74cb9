"""The first batch of loaders, read without an effect on what comes, and where its samples are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel.strategies.data.loaders import (
    CollateCounted,
    DividedIterable,
    DividedIterator,
)
from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.data.samplers import DealtBatches, DividedSampler
from lightning_parallel.strategies.data.unmoved import unmoved
from lightning_parallel.strategies.logged.kept_values import KeptValues
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.trainer import lightnings
from lightning_parallel.techniques.tools.microbatches import SEVERAL, Layout, layout_of

log = logging.getLogger(__name__)

HOST = torch.device("cpu")


def first_batch(trainer: Trainer, combined: Any) -> Any:
    """The first batch of a loop's loaders, on the host, as the step gets it.

    Raises:
        TypeError: a loader that can be read only once.
    """
    loaders = combined.flattened[:1] if lightnings.reads_in_turn(combined) else combined.flattened
    return _prepared(trainer, combined, list(map(_batch_of, loaders)))


def layout_of_batches(trainer: Trainer, combined: Any, dataloader_idx: int, host: dist.ProcessGroup) -> Layout:
    """Where samples are in the batches of a loop's loaders; None where that cannot be seen. All ranks must call.

    The first batch is made again with one sample left out, another one each time, by the user's own `collate_fn` and
    hooks.

    Args:
        trainer: whose loop it is.
        combined: the loop's loaders.
        dataloader_idx: which one, where they are read one after the other.
        host: all ranks.
    """
    in_turn, loaders = lightnings.reads_in_turn(combined), combined.flattened
    layout: Layout = None
    try:
        layout = _layout(trainer, combined, [loaders[dataloader_idx]] if in_turn else loaders)
    except Exception as error:  # data may be of any kind; then it is divided as it looks
        log.debug("Where samples are in a batch was not seen: %r", error)
    said = gather_objects(layout, host)
    if all(theirs == layout for theirs in said):
        return layout
    return next((theirs for theirs in said if _has_several(theirs)), None)


def _layout(trainer: Trainer, combined: Any, loaders: list[Any]) -> Layout:
    with untouched(loaders, trainer):
        samples = list(map(_first_samples, loaders))
    size = len(samples[0])
    if size < 2 or any(not isinstance(some, list) or len(some) != size for some in samples):
        return None

    def batch_without(left_out: int | None) -> Any:
        parts = [[sample for number, sample in enumerate(some) if number != left_out] for some in samples]
        with untouched(loaders, trainer):
            return _prepared(
                trainer, combined, [_collate_of(loader)(part) for loader, part in zip(loaders, parts, strict=True)]
            )

    batch, *others = map(batch_without, (None, *sorted({(size - 1) * k // 4 for k in range(5)})))
    return layout_of(batch, others, size)


def _has_several(layout: Layout) -> bool:
    within: Any = layout.values() if isinstance(layout, dict) else layout if isinstance(layout, tuple) else ()
    return layout == SEVERAL or any(map(_has_several, within))


def _prepared(trainer: Trainer, combined: Any, batches: list[Any]) -> Any:
    """One batch of each loader as the step gets them."""
    batch = batches[0] if lightnings.reads_in_turn(combined) else lightnings.as_given(combined, batches)
    batch = trainer.precision_plugin.convert_input(batch)
    return lightnings.transferred(trainer.lightning_module, batch, HOST)


# ---------------------------------------------------------------- samples


def _batch_of(loader: Any) -> Any:
    if isinstance(loader, DividedIterator):
        return next(_read_again(loader.batches))
    if not isinstance(loader, DataLoader):
        return next(_read_again(loader))
    return _collate_of(loader)(_first_samples(loader))


def _collate_of(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    return loader.collate_fn.collate if isinstance(loader.collate_fn, CollateCounted) else loader.collate_fn


def _first_samples(loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset.dataset if isinstance(loader.dataset, DividedIterable) else loader.dataset
    if isinstance(dataset, IterableDataset):
        samples = _read_again(dataset)
        return next(samples) if loader.batch_size is None else list(islice(samples, loader.batch_size))
    indices = _first_indices(loader)
    if not isinstance(indices, (list, tuple)) or (loader.batch_sampler is None):
        return dataset[indices]
    fetch_many = getattr(dataset, "__getitems__", None)
    return fetch_many(list(indices)) if callable(fetch_many) else [dataset[index] for index in indices]


def _first_indices(loader: Any) -> Any:
    divided: DividedSampler | None = getattr(loader, "divided", None)
    if divided is None:
        return next(iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler))
    if isinstance(divided, DealtBatches):
        return next(iter(divided.sampler))
    return list(islice(iter(divided.sampler), loader.batch_sampler.batch_size))


def _read_again(batches: Any) -> Iterator[Any]:
    iterator: Iterator[Any] = iter(batches)
    if iterator is batches:
        raise TypeError(
            f"a {type(batches).__name__} can be read only once, but a pipeline looks at one batch before the run; "
            "give a loader whose __iter__ starts anew"
        )
    return iterator


@contextmanager
def untouched(loaders: Iterable[Any], trainer: Trainer) -> Iterator[None]:
    """Afterwards random states, and what users made to read data, stand where they stood."""
    module: Any = trainer.lightning_module
    host, kept = RandomState.now(), KeptValues(module)
    with unmoved([*loaders, getattr(trainer, "datamodule", None)]):
        try:
            yield
        finally:
            kept.undo()
            host.restore()
