"""Small checkpoint folders, written by one process in the place of several ranks; and how files are damaged."""

import os
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint import commit, folder
from lightning_parallel.checkpoint.files import name_of
from lightning_parallel.checkpoint.folder import Manifest, Offer, plan_writes, read_manifest
from lightning_parallel.checkpoint.plain import encoded

RANKS = 2


def content(step: int) -> dict[str, Any]:
    """Tensors that two ranks divide by rows, copies that both have, and values."""
    generator = torch.Generator().manual_seed(step)
    model = {
        "weight": torch.randn(4, 6, generator=generator),
        "half": torch.randn(6, 3, generator=generator).bfloat16(),
        "bias": torch.randn(5, generator=generator),
        "steps": torch.tensor(step),
        "empty": torch.empty(0, 3),
    }
    return {"state_dict": model, "global_step": step, "note": f"step {step}"}


def save(target: Path, step: int) -> None:
    values, tensors = encoded(content(step))
    (tables, same), boxes = divided(tensors)
    files: dict[str, Any] = {}
    with commit.writing(target) as made:
        made.mkdir()
        for rank in range(RANKS):
            own = folder.share_of(rank, tables, lambda name, offset, _, rank=rank: boxes[rank][name][offset])
            files |= folder.write_share(made, rank, own)
        head = Manifest(step, {"tp": RANKS}, {}, tables, same, {}, ("state_dict", "global_step", "note"))
        folder.finish(made, values, head, files)
        commit.commit(made, target)


def divided(tensors: dict[str, Tensor]) -> tuple[Any, list[dict[str, dict[tuple[int, ...], Tensor]]]]:
    """What two ranks write of tensors, and what each of them holds."""
    shapes = {name: (name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    boxes = []
    for rank in range(RANKS):
        held = {}
        for name, tensor in tensors.items():
            rows = tensor.chunk(RANKS) if tensor.dim() == 2 and tensor.numel() else None
            offset = (0,) * tensor.dim() if rows is None else (rank * len(rows[0]), 0)
            held[name] = {offset: tensor if rows is None else rows[rank]} if tensor.numel() else {}
        boxes.append(held)
    offers = [
        Offer(shapes, {name: [(o, tuple(b.shape)) for o, b in it.items()] for name, it in held.items()}, {})
        for held in boxes
    ]
    return plan_writes(offers), boxes


def load(target: Path, lazy: bool = False) -> Any:
    manifest = read_manifest(target)
    folder.require_no_faults(target, folder.faults(target, manifest))
    return folder.read(target, manifest, lambda name: lazy)


def is_step(got: Any, step: int) -> bool:
    wanted = content(step)
    same = all(torch.equal(got["state_dict"][name], it) for name, it in wanted["state_dict"].items())
    return same and got["note"] == wanted["note"]


def damage(file: Path, chance: random.Random, others: tuple[str, ...]) -> None:
    """Flips a bit, as most often happens, cuts the file off, adds to it, or puts something else in its place."""
    size, way = file.stat().st_size, chance.choice(["flip"] * 6 + ["cut", "longer", *others])
    if way == "flip":
        flip(file, chance.randrange(size), chance.randrange(8))
    elif way in ("cut", "longer"):
        data = file.read_bytes()
        file.write_bytes(data[: chance.randrange(size)] if way == "cut" else data + chance.randbytes(1 + size % 100))
    else:
        moved = file.rename(file.parent.parent / f"{file.parent.name}.{file.name}")
        makers = {"link": lambda: file.symlink_to(moved), "folder": file.mkdir, "pipe": lambda: os.mkfifo(file)}
        makers.get(way, lambda: None)()


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
