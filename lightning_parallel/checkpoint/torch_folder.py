"""Folders of `torch.distributed.checkpoint`, as Lightning's FSDPStrategy and ModelParallelStrategy write them.

Reading their index runs code, so a run never does: `python -m lightning_parallel.checkpoint import` converts one that
its user trusts, by torch's own converter.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from lightning_parallel.checkpoint.damage import Damaged

INDEX, REST = ".metadata", "meta.pt"


def is_torch_folder(path: Path) -> bool:
    """Return whether a path is such a folder."""
    return path.is_dir() and (path / INDEX).exists()


def unsafe(path: Path) -> Damaged:
    """Return the error of a run that is given such a folder."""
    return Damaged(
        f"{path} is a folder of torch.distributed.checkpoint, whose index may run any code while it is read; if you "
        f"trust who wrote it, convert it: python -m lightning_parallel.checkpoint import {path} FILE.ckpt"
    )


def converted(path: Path) -> dict[str, Any]:
    """Return what Lightning would have written to one file; all of it is in memory.

    Lightning writes the model and each optimizer as entries of their own, and everything else to `meta.pt`.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # not before such a folder is read

    rest: dict[str, Any] = {}
    if (path / REST).exists():
        rest = torch.load(path / REST, map_location="cpu", weights_only=True)
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(path, f"{folder}/all.pt")
        content: dict[str, Any] = torch.load(f"{folder}/all.pt", map_location="cpu", weights_only=True)
    model = content.get("state_dict", content.get("model"))
    if not isinstance(model, dict):
        raise Damaged(f"{path} holds {', '.join(map(str, content))}, and no model that Lightning saved")
    names = sorted((name for name in content if name.startswith("optimizer_")), key=lambda name: int(name[10:]))
    states = {"optimizer_states": [content[name] for name in names]} if names else {}
    return {**rest, "state_dict": model, **states}
