"""Checkpoints of Lightning's own sharding strategies, as one device would have written them.

`FSDPStrategy` and `ModelParallelStrategy` write folders of torch's, in which the model and each optimizer are entries
of their own; and states of optimizers by the names of parameters, where one device has their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_parallel.checkpoint.damage import Damaged
from lightning_parallel.checkpoint.foreign import REST, ForeignFolder
from lightning_parallel.checkpoint.hashed import open_plain
from lightning_parallel.checkpoint.sealed import require_unchanged


def read_folder(folder: ForeignFolder) -> dict[str, Any]:
    """What Lightning would have put into one file.

    Raises:
        Damaged: it is no checkpoint of Lightning's.
    """
    rest = read_rest(folder.path)
    content = folder.read()
    model = content.get("state_dict", content.get("model"))
    if not isinstance(model, dict):
        raise Damaged(f"{folder.path} holds {', '.join(content)}, and no model that Lightning saved")
    names = sorted((name for name in content if name.startswith("optimizer_")), key=lambda name: int(name[10:]))
    whole = {**rest, "state_dict": model}
    return {**whole, "optimizer_states": [content[name] for name in names]} if names else whole


def read_rest(path: Path) -> dict[str, Any]:
    """What a folder holds besides the model and optimizers."""
    if not (path / REST).is_file():
        raise Damaged(f"{path / REST} is missing: the save was not finished; take an earlier checkpoint")
    require_unchanged(path / REST)
    with open(open_plain(path / REST), "rb") as file:
        rest: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return rest


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer by the numbers of parameters, counted in the order in which its groups have them.

    Lightning's have names in folders, and in whole files numbers in the order of the model.
    """
    groups = state.get("param_groups", [])
    names = [name for group in groups for name in group.get("params", ())]
    if names == list(range(len(names))):
        return dict(state)
    numbers = {name: number for number, name in enumerate(names)}
    states: Mapping[Any, Any] = state.get("state", {})
    return {
        **state,
        "state": {numbers.get(name, name): value for name, value in states.items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }
