"""A user's script, run as real processes by `test_launched.py`: python launched.py START_METHOD EVENT RANK STRATEGY."""

import os
import signal
import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader

from lightning_parallel import PipelineParallelStrategy, TensorParallelStrategy, ZeroStrategy

STRATEGIES = {"zero": ZeroStrategy, "tensor": TensorParallelStrategy, "pipeline": PipelineParallelStrategy}


def interrupted() -> bool:
    """Whether a first SIGINT has come; a pipeline calls a step for each microbatch."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_DFL


EVENTS = {
    "nothing": lambda: None,
    "raise": lambda: (_ for _ in ()).throw(RuntimeError("the user's code failed here")),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: interrupted() or os.kill(os.getpid(), signal.SIGINT),
    "press Ctrl-C": lambda: interrupted() or os.killpg(0, signal.SIGINT),
    "press Ctrl-C twice": lambda: [os.killpg(0, signal.SIGINT) for _ in range(2)],
}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Regression(LightningModule):
    def __init__(self, event: str = "nothing", rank: int = 0) -> None:
        super().__init__()
        self.event, self.rank = event, rank
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.scale, self.shift = torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.zeros(8))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3 and self.global_rank == self.rank:
            print(f"event at {time.time()}", flush=True)
            EVENTS[self.event]()
        time.sleep(0.05)
        for layer in self.layers:
            batch = layer(batch)
        batch = self.scale * batch + self.shift
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    start_method, event, rank, strategy, folder = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[strategy](start_method=start_method),
        max_steps=30,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[OnExceptionCheckpoint(folder)],
    )
    module = Regression(event, int(rank))
    trainer.fit(module, DataLoader(torch.randn(400, 8), batch_size=2))
    weight = module.layers[0].up.weight
    print(f"finished with {type(weight).__name__} {tuple(weight.shape)}", flush=True)


if __name__ == "__main__":
    main()
