"""A user's script that torchrun starts for `test_joining_torchrun.py`: joining.py EVENT NODES FOLDER.

Rank 1 may not live to join; what happens to it happens once rank 0 has come.
"""

import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_parallel import DataParallelStrategy
from tests.strategies.launched import Regression


def nothing() -> None:
    pass


def raises() -> None:
    raise ValueError("a file of this rank is not there")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


EVENTS = {event.__name__: event for event in (nothing, raises, dies)}


def happens(event: str, rank: int, comes: Path) -> None:
    if rank == 0:
        comes.touch()
    if rank == 1:
        while not comes.exists():
            time.sleep(0.01)
        print(f"event at {time.time()}", flush=True)
        EVENTS[event]()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    event, nodes, folder = sys.argv[1:]
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # torchrun keeps the store, and no rank does
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(nodes),
        strategy=DataParallelStrategy(timeout=timedelta(seconds=180)),
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    rank = int(os.environ["RANK"])
    happens(event, rank, Path(folder) / "comes")
    trainer.fit(Regression(), DataLoader(torch.randn(64, 8), batch_size=2))
    print(f"rank {rank} finished after step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        sys.excepthook(*sys.exc_info())  # as Python does
        os._exit(1)  # at once: torchrun ends the others then
