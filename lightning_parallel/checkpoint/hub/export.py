"""Makes a Hugging Face folder of a checkpoint of any form, in one process with one tensor in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint import folder
from lightning_parallel.checkpoint.damage import Damaged, lost
from lightning_parallel.checkpoint.foreign import ForeignFolder, is_foreign
from lightning_parallel.checkpoint.hub.folder import LARGEST, write
from lightning_parallel.checkpoint.hub.names import Names, to_hub
from lightning_parallel.checkpoint.manifest import read_manifest
from lightning_parallel.checkpoint.sealed import require_unchanged


def content_of(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, verified; its tensors stay on the disk.

    Raises:
        Damaged: it is not as it was written, or is none.
    """
    if not path.exists():
        raise Damaged(f"there is no checkpoint at {path}")
    if folder.is_folder(path):
        manifest = read_manifest(path)
        folder.require_whole(path, folder.faults(path, manifest))
        found: dict[str, Any] = folder.read(path, manifest, lambda name: True)
        return found
    if is_foreign(path):
        opened = ForeignFolder(path)
        folder.require_whole(path, opened.faults())
        read = opened.read()
        return {"state_dict": read.get("state_dict", read.get("model", {}))}
    if path.is_dir():
        raise Damaged(f"{path} is no checkpoint: it has no manifest, and no index of torch's")
    require_unchanged(path)
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return loaded


def weights_of(content: Mapping[str, Any], prefix: str | None = None) -> dict[str, Tensor]:
    """The weights under the names of the model itself.

    Args:
        content: of a checkpoint.
        prefix: what the module's names begin with, as `model.`; None for what all of them share.
    """
    state = {name: value for name, value in content["state_dict"].items() if isinstance(value, Tensor)}
    if prefix is None:
        above = zip(*(name.split(".")[:-1] for name in state), strict=False)
        prefix = "".join(f"{parts[0]}." for parts in takewhile(lambda parts: len(set(parts)) == 1, above))
    found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if not found:
        raise Damaged(f"no name of the checkpoint begins with {prefix!r}: it holds {lost(sorted(state))}")
    return found


def export(
    weights: Mapping[str, Tensor],
    output: Path,
    config: Mapping[str, Any],
    known: Sequence[Names] = (),
    largest: int = LARGEST,
) -> None:
    """Writes weights as a folder that `from_pretrained` loads.

    Args:
        weights: under the names of the module.
        output: the folder, which must not be there yet.
        config: for `config.json`.
        known: kinds of names that the hub has otherwise.
        largest: bytes of tensors in a file.
    """
    write(output, to_hub(weights, known), config, largest)
