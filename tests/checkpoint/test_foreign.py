"""Indices of torch's folders, as different versions of Python write them."""

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_parallel.checkpoint.damage import Damaged
from lightning_parallel.checkpoint.foreign import INDEX, ForeignFolder


class AsEarlier(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class Hostile(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (getattr, (torch.Size, "numel")) if isinstance(value, Enum) else NotImplemented


def rewritten(folder: Path, pickler: type[pickle.Pickler]) -> Path:
    dcp.save({"weight": torch.arange(6.0)}, checkpoint_id=folder, no_dist=True)
    index, text = folder / INDEX, io.BytesIO()
    pickler(text).dump(pickle.loads(index.read_bytes()))
    assert b"getattr" in text.getvalue()
    index.write_bytes(text.getvalue())
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_index_of_an_earlier_python_is_read(tmp_path: Path) -> None:
    assert not ForeignFolder(rewritten(tmp_path / "folder", AsEarlier)).faults()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nothing_else_is_asked_for_its_parts(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match=r"asks .*Size.* for its numel, which no checkpoint needs"):
        ForeignFolder(rewritten(tmp_path / "folder", Hostile))
