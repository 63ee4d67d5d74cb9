"""A user's script, run as real processes by `test_launched.py`: launched.py START_METHOD EVENT RANK STRATEGY RANKS DIR.

Events take place in batch 3 on one rank; "dies first" before rank 1 joins, once rank 0 has come.
"""

import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy, TensorParallelStrategy, ZeroStrategy
from lightning_parallel.strategies import rank_strategy
from tests.strategies.faults.regression import Regression

STRATEGIES = {"zero": ZeroStrategy, "tensor": TensorParallelStrategy, "pipeline": PipelineParallelStrategy}
HANGS = "sleeps", "leaves out"
TIMEOUT, JOINING = timedelta(seconds=10), timedelta(seconds=120)
"""Of collectives of a run that hangs; and of processes that import, one after the other."""


def interrupted() -> bool:
    """Whether a first SIGINT has come; a pipeline calls a step for each microbatch."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_DFL


EVENTS: dict[str, Any] = {
    "raise": lambda: (_ for _ in ()).throw(RuntimeError("the user's code failed here")),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: interrupted() or os.kill(os.getpid(), signal.SIGINT),
    "press Ctrl-C": lambda: interrupted() or os.killpg(0, signal.SIGINT),
    "press Ctrl-C twice": lambda: [os.killpg(0, signal.SIGINT) for _ in range(2)],
}


class Launched(Regression):
    def __init__(self, event: str, rank: int) -> None:
        super().__init__()
        self.of_batch_3, self.rank = event, rank

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3 and self.of_batch_3 in HANGS:
            self.hang()
        elif batch_idx == 3 and self.global_rank == self.rank:
            print(f"event at {time.time()}", flush=True)
            EVENTS.get(self.of_batch_3, lambda: None)()
        if self.of_batch_3 not in HANGS:
            time.sleep(0.05)
        return super().training_step(batch, batch_idx)

    def hang(self) -> None:
        if self.of_batch_3 == "sleeps" and self.global_rank == self.rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends at once when it is told to
            time.sleep(600)
        if self.of_batch_3 == "leaves out" and self.global_rank != self.rank:
            torch.distributed.barrier()


def die_first(comes: Path) -> None:
    """Rank 1 ends once rank 0 has come."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        comes.touch()
        return
    while not comes.exists():
        time.sleep(0.01)
    print(f"event at {time.time()}", flush=True)
    EVENTS["kill"]()


def main() -> None:
    warnings.simplefilter("ignore")
    start_method, event, rank, strategy, ranks, folder = sys.argv[1:]
    torch.set_num_threads(1)
    options: dict[str, Any] = {} if start_method == "torchrun" else {"start_method": start_method}
    if event in HANGS:
        wait_for_all, options["timeout"] = rank_strategy.wait_for_all, TIMEOUT
        rank_strategy.wait_for_all = lambda environment, _: wait_for_all(environment, JOINING)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(ranks),
        strategy=STRATEGIES[strategy](**options),
        max_steps=30,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=event not in HANGS,
        callbacks=[] if event in HANGS else [OnExceptionCheckpoint(folder)],
    )
    if event == "dies first":
        die_first(Path(folder) / "comes")
    module = Launched(event, int(rank))
    trainer.fit(module, DataLoader(torch.randn(400, 8), batch_size=2))
    if event == "works on":
        time.sleep(3 * trainer.global_rank)
    weight = module.layers[0].up.weight
    print(f"finished with {type(weight).__name__} {tuple(weight.shape)}", flush=True)


if __name__ == "__main__":
    main()
