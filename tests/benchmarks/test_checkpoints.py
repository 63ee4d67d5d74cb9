"""What saving and loading a sharded checkpoint takes, beside the same bytes written and read by the same ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_parallel import ZeroStrategy
from lightning_parallel.checkpoint.files import CHUNK, sha256_of
from lightning_parallel.techniques.tools.shards import local
from tests.benchmarks.interleaved import Repeated, markdown, show, spread
from tests.benchmarks.models import Transformer
from tests.ranks import run_on_ranks
from tests.trainers import trainer

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]

RANKS, WIDTH, BLOCKS = 2, 1024, 6
ROUNDS = int(os.environ.get("ROUNDS", "5"))


def written(path: Path, data: memoryview) -> None:
    """Writes a new file, and waits until it is on the disk."""
    with path.open("xb") as file:
        for start in range(0, len(data), CHUNK):
            file.write(data[start : start + CHUNK])
        file.flush()
        os.fsync(file.fileno())


def held(one: Trainer) -> list[Tensor]:
    """This rank's parts of parameters and states."""
    states = [optimizer.state for optimizer in one.optimizers]
    tensors = [*one.lightning_module.parameters(), *tree_leaves([list(state.values()) for state in states])]
    return [local(each.detach()) for each in tensors if isinstance(each, Tensor)]


def bytes_of(name: str) -> int:
    """What Linux says that this process holds, by the name that it has there."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Timed(Callback):
    """Saves and loads at the end of training, in turns with what that is compared with."""

    def __init__(self, folder: str, in_background: bool) -> None:
        self.in_background = in_background
        self.folder, self.rounds = Path(folder), list[dict[str, float]]()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = trainer.strategy
        for number in range(ROUNDS + 1):
            folder = self.folder / str(number)
            folder.mkdir(exist_ok=True)
            saved, rank = folder / "saved", dist.get_rank()
            self.rounds.append(found := {})
            size = sum(each.nbytes for each in held(trainer))
            data = memoryview(bytes(0 if self.in_background else size))
            acts: dict[str, Callable[[], Any]] = {
                "save": partial(trainer.save_checkpoint, saved),
                "write": partial(written, folder / f"written-{rank}", data),
                "write again": partial(written, folder / f"again-{rank}", data),
            }
            self.measure(found, acts, backwards=number % 2 == 1)
            trainer.strategy.load_checkpoint(saved)  # waits for what is under way
            files = sorted(path for path in saved.rglob("*") if path.is_file())[rank::RANKS]
            acts = {
                "copy": lambda: [each.clone() for each in held(trainer)],
                "load": lambda saved=saved: strategy.load_optimizer_state_dict(strategy.load_checkpoint(saved)),
                "read": lambda files=files: [sha256_of(each.open("rb"), each.stat().st_size) for each in files],
            }
            self.measure(found, acts, backwards=number % 2 == 1)
            found["bytes"] = size
            if rank == 0:
                shutil.rmtree(folder)
        del self.rounds[0]

    def measure(self, found: dict[str, float], acts: dict[str, Callable[[], Any]], backwards: bool) -> None:
        for name in list(acts)[:: -1 if backwards else 1]:
            Path("/proc/self/clear_refs").write_text("5")  # what the process holds at most is counted from here
            before = bytes_of("VmRSS")
            os.sync()  # what others left to be written
            dist.barrier()
            start = time.perf_counter()
            acts[name]()
            dist.barrier()
            found[name] = time.perf_counter() - start
            found[f"more memory: {name}"] = bytes_of("VmHWM") - before


def measured(folder: str, in_background: bool) -> list[dict[str, float]]:
    timed = Timed(folder, in_background)
    strategy = ZeroStrategy(checkpoint="sharded", async_save=in_background)
    one = trainer(strategy, RANKS, callbacks=[timed], max_steps=1, limit_val_batches=0)
    one.fit(Transformer(WIDTH, BLOCKS), DataLoader(Repeated((8, WIDTH), 2 * RANKS), 2))
    return timed.rounds


def test_saving_and_loading(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["ratio", "measured", "goal"]]
    for in_background in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            both = run_on_ranks(RANKS, measured, folder, in_background, timeout=300.0, limit=900.0)
            rounds = both[0]
        for act in ("save", "load"):
            more = max(each[f"more memory: {act}"] - each["bytes"] for found in both for each in found) / 2**20
            when = " in the background" * in_background
            rows.append([f"MiB of memory to {act}{when}, beyond this rank's part", f"{more:.0f}", "256"])

        def ratio(name: str, base: str, rounds: list[dict[str, float]] = rounds) -> str:
            return spread([each[name] / each[base] for each in rounds])

        if in_background:
            rows.append(["what stops training / a copy in memory", ratio("save", "copy"), "1.2"])
            continue
        rows.append(["the same bytes written / saved and hashed", ratio("write", "save"), "0.8"])
        rows.append(["the same bytes written, A/A", ratio("write again", "write"), ""])
        rows.append(["verified, and states taken / read and hashed", ratio("load", "read"), "1.5"])
        said = f"{rounds[0]['bytes'] / 2**20:.0f} MiB on each of {RANKS} ranks, load {os.getloadavg()[0]:.1f}"
    show(capsys, "Sharded checkpoints", [said, markdown(rows)])
