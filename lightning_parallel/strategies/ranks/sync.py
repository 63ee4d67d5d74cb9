"""The message by which ranks agree on what comes next: batches, loaders, steps, and requests to stop.

At each sync point every rank sends one message of the same length, so that ranks which are at different points compare
their messages with each other, and an error on all of them says where each one is. One all-reduce of some 20 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from lightning_parallel.collectives.functional import highest
from lightning_parallel.strategies.ranks.agreement import gather_objects, require_same


class SyncPoint(IntEnum):
    """A place at which all ranks exchange a message."""

    LOADERS = 1  #: loaders are about to be made or registered
    PASS_BEGINS = 2
    BATCH = 3
    STEP_BEGINS = 4  #: only where `on_train_batch_start` may end the epoch
    STEP_ENDS = 5
    STEP_WITHOUT_LOSS = 6
    BACKWARD = 7  #: within a step, by hand
    PASS_ENDS = 8
    TRAINING_ENDS = 9


@dataclass(frozen=True)
class Message:
    """What a rank sends to all others at a sync point."""

    point: SyncPoint
    loader: int = 0  #: the index of the batch's loader
    batch: int = 0  #: the index of the batch
    is_last: bool = False  #: whether it is the last batch of a loader that has no length
    checksum: int = 0  #: of all else that must be the same, as the structure of the batch
    samples: int = 0  #: that this rank has of the batch
    means: int = 0  #: the number of means that the step computed, in which ranks may differ
    learned_means: int = 0  #: of these, those that have gradients
    stop: int = 0  #: the signal that asked this process to stop, 0 if none has
    requeue: bool = False  #: whether SLURM asked to requeue
    save_failed: bool = False  #: whether a save in the background has failed


class Reply(NamedTuple):
    """What the messages of all ranks say together: the highest signal, the least number of samples, and so on."""

    fewest_samples: int
    same_means: bool
    same_learned_means: bool
    stop: int
    requeue: bool
    save_failed: bool


class Words(NamedTuple):
    """A message in words, made only where ranks differ."""

    place: str  #: "batch 3 of loader 0"
    structure: str = ""  #: of the batch
    settings: str = ""  #: the numbers by which optimizers step


class Exchange:
    """Sends this rank's message at once; `wait` returns the reply. Collective over `group`, all ranks."""

    def __init__(self, message: Message, group: dist.ProcessGroup) -> None:
        self._point, self._group = message.point, group
        same = [message.point, message.loader, message.batch, message.is_last, message.checksum]
        counts = [message.means, message.learned_means]
        asked = [message.stop, message.requeue, message.save_failed]
        numbers = [*same, *[-n for n in same], *counts, *[-n for n in counts], *asked, -message.samples]
        self._numbers = torch.from_numpy(np.array(numbers, dtype=np.float64))  # torch reads lists four times as slowly
        self._work = highest(self._numbers, group)

    def wait(self, describe: Callable[[], Words]) -> Reply:
        """Wait for all ranks.

        Raises:
            ValueError: on every rank, if they are at different points or hold different things.
        """
        self._work.wait()
        *numbers, means, learned, least_means, least_learned, stop, requeue, failed, samples = self._numbers.tolist()
        if numbers[:5] != [-lowest for lowest in numbers[5:]]:
            _explain(gather_objects((self._point, describe()), self._group))
        return Reply(
            -int(samples), means == -least_means, learned == -least_learned, int(stop), bool(requeue), bool(failed)
        )


EVENLY = "every rank must read equally many batches"
RULES = {
    SyncPoint.LOADERS: (
        "which loaders are read next",
        "give every rank equally many loaders, to fit as by the hooks that return them",
    ),
    SyncPoint.STEP_WITHOUT_LOSS: (
        "whether a step returns a loss",
        "Lightning cannot skip a batch on several ranks: return a loss times zero",
    ),
    SyncPoint.STEP_ENDS: ("what is logged", "log on all ranks alike, or on one with rank_zero_only=True"),
    SyncPoint.BACKWARD: ("what ranks do next", "call self.manual_backward equally often on all ranks"),
    SyncPoint.STEP_BEGINS: (
        "whether an epoch goes on",
        "on_train_batch_start returns -1 on all ranks or on none: decide it by batch_idx, or by what all have",
    ),
}
"""Of a sync point at which only some ranks are, or with different checksums: what differs, and the remedy."""


def _explain(received: list[tuple[SyncPoint, Words]]) -> None:
    places, structures, settings = zip(*(words for _, words in received), strict=True)
    for point, (what, remedy) in RULES.items():
        if any(other == point for other, _ in received):
            require_same(what, places, remedy)
    require_same("the end of the data", places, f"{EVENLY}, or set trainer.should_stop when all others do")
    require_same("the structure of a batch", structures, "look at the dataset there")
    require_same(
        "learning rates, momenta and weight decays of optimizers",
        settings,
        "set them where all ranks come, such as on_train_batch_end, by what all of them have: "
        "trainer.callback_metrics, or self.all_gather(loss).mean()",
    )


def require_same_content(checksum: int | None, shard: int, shards: int, place: str, group: dist.ProcessGroup) -> None:
    """Raise on every rank if ranks that must read the same batch read different ones. Collective over `group`.

    Args:
        checksum: of this rank's batch; None where it is not known.
        shard: the number of the part of the data that this rank reads. Ranks that hold shards of one model for the same
            samples have the same.
        shards: the number of such parts.
        place: names the batch in the error.
        group: all ranks.
    """
    numbers = torch.full((2, shards), -torch.inf, dtype=torch.float64)
    if checksum is not None:
        numbers[:, shard] = torch.tensor([checksum, -checksum])
    highest(numbers, group).wait()
    most, least = numbers[0], -numbers[1]
    if not bool(((most != least) & most.isfinite()).any()):
        return
    received = gather_objects((shard, checksum), group)
    for each in range(shards):
        ranks = [rank for rank, (other, _) in enumerate(received) if other == each]
        if len({received[rank][1] for rank in ranks}) > 1:
            raise ValueError(
                f"{place} differs between ranks {', '.join(map(str, ranks))}, which must read the same samples: each "
                "holds a part of the model for them. Where data is made at random, call seed_everything(N) before it "
                "is made, with one N on all ranks. Otherwise make what is random in the dataset or in loader workers "
                "depend on the sample, or leave out seed_everything(workers=True), which seeds workers by rank; a "
                "loader that divides itself takes the part in trainer.distributed_sampler_kwargs, not by its rank"
            )
