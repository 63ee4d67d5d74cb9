"""A user's script, run as real processes by `test_launched.py`: python launched.py START_METHOD EVENT RANK."""

import os
import signal
import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_parallel import ZeroStrategy

EVENTS = {
    "nothing": lambda: None,
    "raise": lambda: (_ for _ in ()).throw(RuntimeError("the user's code failed here")),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


class Regression(LightningModule):
    def __init__(self, event: str = "nothing", rank: int = 0) -> None:
        super().__init__()
        self.event, self.rank = event, rank
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3 and self.global_rank == self.rank:
            print(f"event at {time.time()}", flush=True)
            EVENTS[self.event]()
        time.sleep(0.05)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    start_method, event, rank, folder = sys.argv[1:]
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ZeroStrategy(start_method=start_method),
        max_steps=30,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[OnExceptionCheckpoint(folder)],
    )
    module = Regression(event, int(rank))
    trainer.fit(module, DataLoader(torch.randn(400, 8), batch_size=2))
    print(f"finished with {type(module.layer.weight).__name__} {tuple(module.layer.weight.shape)}", flush=True)


if __name__ == "__main__":
    main()
