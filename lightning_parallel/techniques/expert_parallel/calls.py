"""Whether ranks call the same experts, equally often: else one would wait for messages that nobody sends.

With the counts of what comes ranks tell each other which module calls, and after a step that they call no more. So a
rank that calls where another does not finds out at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_parallel.collectives.functional import Pending
from lightning_parallel.collectives.rows import start_exchange, told

END = 0
"""What a rank says after a step, in place of the number of a module."""


class Calls:
    """The calls of experts on the ranks that hold different ones.

    Args:
        group: these ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._names = ["no experts any more in this step"]
        self._ended = Pending(None)

    def number(self, name: str) -> int:
        """The number of a module, from its FQN; the same on all ranks."""
        self._names.append(name)
        return len(self._names) - 1

    def refuse_transforms(self, number: int) -> None:
        """Raises RuntimeError within a transform of `torch.func`, which no message between ranks goes through."""
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"a transform of torch.func, such as torch.func.grad, calls {self._names[number]}, of which each rank "
                "has some experts; transforms know nothing of what ranks send each other: use torch.autograd.grad, "
                "with torch.func.functional_call where weights are given, or leave out ExpertParallel"
            )

    def meet(self, number: int, device: torch.device) -> None:
        """All ranks are about to call this module.

        Raises:
            RuntimeError: not all.
        """
        said = told(torch.full((self.group.size(), 2), number, device=device), self.group)
        self.require(number, said[:, 1].tolist())

    def require(self, number: int, said: Sequence[int]) -> None:
        """Raises RuntimeError unless all ranks said this number."""
        for rank, other in zip(dist.get_process_group_ranks(self.group), said, strict=True):
            if other != number:
                raise RuntimeError(
                    f"this rank calls {self._names[number]}, and rank {rank} {self._names[other]}, but under expert "
                    "parallel tokens travel in each call, so all ranks call the same experts equally often; call them "
                    "whatever a rank's own samples are, with no tokens if it has none"
                )

    def end(self, device: torch.device) -> None:
        """This rank's step is over; nobody waits for the others here."""
        self._ended.wait()
        nothing = torch.zeros(self.group.size(), 2, dtype=torch.long, device=device)
        each = [1] * self.group.size()
        _, self._ended = start_exchange(nothing, each, each, self.group)
