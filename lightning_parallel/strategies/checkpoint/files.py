"""Full checkpoints: files that appear whole or not at all, carry their hash, and are read without running code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO, Any, cast

import torch

from lightning_parallel.checkpoint import commit
from lightning_parallel.checkpoint.sealed import SealedFile, load, require_unchanged
from lightning_parallel.strategies.lightning_package import TorchCheckpointIO

log = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own reader and writer, whose files appear whole or not at all, also after a power failure.

    Args:
        verifies: whether a file that is read must be as it was written.
        warns: whether the first save warns of objects that a reader which runs no code refuses.
    """

    def __init__(self, verifies: bool = True, warns: bool = True) -> None:
        self._verifies, self._warns = verifies, warns

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes beside the path, flushes to disk, then renames. Remote paths are written as Lightning does."""
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        if storage_options is not None:
            raise TypeError("storage_options are for remote paths; pass a checkpoint_io that understands them")
        target = Path(path)
        with commit.writing(target) as name:
            with SealedFile(name) as file:
                torch.save(checkpoint, cast(IO[bytes], file))  # it only writes
            commit.commit(name, target)
        warns, self._warns = self._warns, False
        if warns and (classes := torch.serialization.get_unsafe_globals_in_checkpoint(path)):
            log.warning(  # torch's reader of weights refuses a file with such classes, as `pathlib.PosixPath`
                "%s holds objects that are no plain values (%s), in its hyperparameters or elsewhere: this run and "
                "load_from_checkpoint refuse to read it back. Leave them out with save_hyperparameters(ignore=[...]), "
                "save numbers, strings, lists and dictionaries in their place, or pass trust_checkpoint_code=True to "
                "the strategy, by which reading a checkpoint may run code",
                path,
                ", ".join(classes),
            )
        return None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Maps the file into memory, so that ranks share one copy and read only what they keep.

        Raises:
            FileNotFoundError: there is no file at the path.
            ValueError: there is one, but it is no checkpoint, or not as it was written, or it would have to run code.
        """
        safe = True if weights_only is None else weights_only
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, safe)
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no checkpoint at {path}")
        if self._verifies:
            require_unchanged(Path(path))
        loaded: dict[str, Any] = load(path, map_location or "cpu", safe)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a file or a folder; from the first moment on nobody takes what is left of it for a checkpoint."""
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            commit.remove(Path(path))
