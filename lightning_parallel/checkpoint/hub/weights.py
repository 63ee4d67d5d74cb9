"""The weights of a checkpoint of any form, for a Hugging Face folder; they are read when they are used."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_parallel.checkpoint import folder
from lightning_parallel.checkpoint.damage import Damaged, shortened
from lightning_parallel.checkpoint.manifest import read_manifest
from lightning_parallel.checkpoint.sealed import load, require_unchanged
from lightning_parallel.checkpoint.torch_folder import is_torch_folder, unsafe


def content_of(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, verified; its tensors stay on the disk.

    Raises:
        ValueError: it is not as it was written, or is none; or it would have to run code.
    """
    if not path.exists():
        raise Damaged(f"there is no checkpoint at {path}")
    if folder.is_folder(path):
        manifest = read_manifest(path)
        folder.require_whole(path, folder.faults(path, manifest))
        found: dict[str, Any] = folder.read(path, manifest, lambda name: True)
        return found
    if is_torch_folder(path):
        raise unsafe(path)
    if path.is_dir():
        raise Damaged(f"{path} is no checkpoint: it has no manifest")
    require_unchanged(path)
    loaded = load(path)
    return loaded if isinstance(loaded, dict) else {}


def weights_of(content: Mapping[str, Any], prefix: str | None = None) -> dict[str, Tensor]:
    """The weights under the names of the model itself.

    Args:
        content: of a checkpoint.
        prefix: what the module's names begin with, as `model.`; None for what all of them share.
    """
    found = content.get("state_dict")
    if not isinstance(found, Mapping):
        raise Damaged(f"the checkpoint holds {shortened(sorted(map(str, content)))}, and no state_dict of a module")
    state = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if prefix is None:
        above = zip(*(name.split(".")[:-1] for name in state), strict=False)
        prefix = "".join(f"{parts[0]}." for parts in takewhile(lambda parts: len(set(parts)) == 1, above))
    own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if not own:
        raise Damaged(f"no name of the checkpoint begins with {prefix!r}: it holds {shortened(sorted(state))}")
    return own
