"""A user's script that hangs, run as real processes by `test_hanging.py`: hanging.py START_METHOD EVENT RANK RANKS."""

import signal
import sys
import time
import warnings
from datetime import timedelta

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_parallel import ZeroStrategy
from lightning_parallel.strategies import rank_strategy
from tests.strategies.launched import Regression

TIMEOUT, JOINING = timedelta(seconds=10), timedelta(seconds=120)
"""Of collectives; and of processes that import, one after the other."""


class Hangs(Regression):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            self.hang()
        return super().training_step(batch, -1)

    def hang(self) -> None:
        if self.event == "sleeps" and self.global_rank == self.rank:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends at once when it is told to
            time.sleep(600)
        if self.event == "leaves a collective out" and self.global_rank != self.rank:
            torch.distributed.barrier()


wait_for_all = rank_strategy.wait_for_all
rank_strategy.wait_for_all = lambda environment, _: wait_for_all(environment, JOINING)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start_method, event, rank, ranks = sys.argv[1:]
    trainer = Trainer(
        accelerator="cpu",
        devices=int(ranks),
        strategy=ZeroStrategy(start_method=start_method, timeout=TIMEOUT),
        max_steps=5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Hangs(event, int(rank)), DataLoader(torch.randn(64, 8), batch_size=2))


if __name__ == "__main__":
    main()
