"""Files that appear whole or not at all, and are read without executing anything."""

from __future__ import annotations

import os
import secrets
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own reader and writer, whose files appear whole or not at all, also after a power failure."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes beside the path, flushes to disk, then renames. Remote paths are written as Lightning does."""
        if "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        if storage_options is not None:
            raise TypeError("storage_options are for remote paths; pass a checkpoint_io that understands them")
        _write_atomically(checkpoint, Path(path))
        return None

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Maps the file into memory, so that ranks share one copy and read only what they keep.

        Raises:
            FileNotFoundError: there is no file at the path.
            ValueError: there is one, but it is no checkpoint, or not a whole one.
        """
        if "://" in str(path):
            return super().load_checkpoint(path, map_location, weights_only)
        if not Path(path).exists():
            raise FileNotFoundError(f"there is no checkpoint at {path}")
        safe = True if weights_only is None else weights_only
        mapped = zipfile.is_zipfile(path)  # files in torch's first format cannot be
        try:
            loaded: dict[str, Any] = torch.load(path, map_location or "cpu", mmap=mapped, weights_only=safe)
        except (RuntimeError, EOFError, KeyError) as error:
            raise ValueError(f"{path} is no checkpoint, or was cut off; take an earlier one ({error})") from error
        return loaded


def _write_atomically(checkpoint: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    name = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less what the process's umask forbids
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
