"""Which features of a colwise module its users read, and whether a rank's heads read those of the same heads.

A fused weight may hold all queries before all keys, or the query, the key and the value of each head side by side: the
shapes are the same. What is read can be seen from strides: code between a product and its use takes views of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_parallel.techniques.tensor_parallel.layout import Divided
from lightning_parallel.techniques.tools.shards import bounds


@dataclass(frozen=True)
class Read:
    """One operation on a view of what a colwise module gave.

    Args:
        module: its name.
        features: how many it gave here.
        sizes: of the view.
        strides: of the view.
        start: where the view starts in memory.
    """

    module: str
    features: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def numbers(self) -> Tensor:
        """The numbers of the features that are read, along the dimensions that are none of samples or positions."""
        found = torch.tensor(self.start, device="cpu")
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if size > 1 and stride % self.features:
                found = found[..., None] + torch.arange(size, device="cpu") * stride
        return found % self.features


class Reads:
    """Collects them during a run."""

    def __init__(self) -> None:
        self.seen: list[Read] = []
        self._modules: dict[int, tuple[str, Tensor]] = {}

    def begin(self, module: str, output: Tensor) -> None:
        """A colwise module gave this."""
        rows = (stride % output.shape[-1] for stride in output.stride()[:-1])
        if output.dim() and output.stride(-1) == 1 and not any(rows) and not output.storage_offset():
            self._modules[output.untyped_storage()._cdata] = module, output

    def follow(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Notes what an operation reads that makes something new."""
        made = {tensor.untyped_storage()._cdata for tensor in outputs}
        for tensor in inputs:
            storage = tensor.untyped_storage()._cdata
            if storage in self._modules and storage not in made:
                module, output = self._modules[storage]
                sizes, start = tuple(tensor.shape), int(tensor.storage_offset())
                self.seen.append(Read(module, output.shape[-1], sizes, tensor.stride(), start))


def wrong_read(whole: Reads, here: Reads, divided: dict[str, Divided], ranks: int, rank: int) -> str | None:
    """Which module's features would be others than those of this rank's heads."""
    wanted, found = _by_module(whole), _by_module(here)
    for module in found.keys() | wanted.keys():
        pairs = list(zip(wanted.get(module, []), found.get(module, []), strict=False))
        same_number = len(wanted.get(module, [])) == len(found.get(module, []))
        own = _of_rank(divided[module], ranks, rank)
        whole_here = any(read.features == divided[module].features for read in here.seen if read.module == module)
        if not same_number or not all(_is_share(w, f if whole_here else own[f], ranks, rank) for w, f in pairs):
            return f"{module} has its features in another order than {divided[module].style.told} says"
    return None


def _by_module(reads: Reads) -> dict[str, list[Tensor]]:
    """What is read of each module, once for all operations that read the same."""
    found: dict[str, list[Tensor]] = {}
    for read in dict.fromkeys(reads.seen):
        numbers, before = read.numbers(), found.setdefault(read.module, [])
        if not any(torch.equal(numbers.flatten(), other.flatten()) for other in before):
            before.append(numbers)
    return found


def _of_rank(divided: Divided, ranks: int, rank: int) -> Tensor:
    """The numbers in the whole of the features that a rank has."""
    found, start = [], 0
    for part in divided.parts:
        found.append(start + torch.arange(*bounds(part, ranks, rank), device="cpu"))
        start += part
    return torch.cat(found)


def _is_share(whole: Tensor, found: Tensor, ranks: int, rank: int) -> bool:
    """Whether a rank's are all, or those of its share of one dimension."""
    shares = [whole]
    for dim, size in enumerate(whole.shape):
        start, stop = bounds(size, ranks, rank)
        shares.append(whole.narrow(dim, start, stop - start))
    return any(share.numel() == found.numel() and torch.equal(share.flatten(), found.flatten()) for share in shares)
