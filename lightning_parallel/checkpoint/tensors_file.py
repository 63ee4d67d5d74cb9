"""Files of tensors in the form of safetensors: the length of a header, a header in JSON, the bytes of the tensors."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.damage import Damaged, reading
from lightning_parallel.checkpoint.hashed import Content, HashedFile, open_plain

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}
MAX_HEADER = 100 * 2**20  # as safetensors itself


def name_of(dtype: torch.dtype) -> str | None:
    """Return the name of a dtype in such a file; None where it has none."""
    return next((name for name, known in DTYPES.items() if known == dtype), None)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Content:
    """Write tensors of any device, one at a time, those with the longest elements first: so all are aligned."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": name_of(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            if tensor.numel():
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return file.content


@dataclass(frozen=True)
class Entry:
    """One tensor in a file; its bytes lie from `start` to `stop`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorsFile:
    """A file of tensors, mapped into memory: what is not used is not read.

    Args:
        path: of a file that has been verified, or may be anything.

    Raises:
        Damaged: it is no such file.
    """

    def __init__(self, path: Path) -> None:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise Damaged(f"{path} has {size} bytes, fewer than its header announces")
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)[8 + length :]
        with reading(path):
            header = json.loads(mapped[8 : 8 + length])
            self.entries = {name: self._entry(name, it) for name, it in header.items() if name != "__metadata__"}

    def _entry(self, name: str, content: Any) -> Entry:
        (start, stop), shape, dtype = content["data_offsets"], tuple(content["shape"]), DTYPES[content["dtype"]]
        if not all(type(n) is int and n >= 0 for n in (start, stop, *shape)):
            raise ValueError(f"{name} has sizes that are no numbers")
        if not start <= stop <= self._bytes.numel() or stop - start != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} lies outside the file, or has another size than its shape")
        return Entry(dtype, shape, start, stop)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor whose memory is the file's; what is written to it does not reach the file."""
        entry = self.entries[name]
        values = self._bytes[entry.start : entry.stop]
        if not values.numel():
            return torch.empty(entry.shape, dtype=entry.dtype)
        if values.data_ptr() % entry.dtype.itemsize:  # another program does not align them
            values = values.clone()
        return values.view(entry.dtype).view(entry.shape)
