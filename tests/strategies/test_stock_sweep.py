"""The kills of `test_checkpoint_sweep.py`, on Lightning's own strategies: nothing is asserted of them, it is counted.

A run goes on as a user of Lightning lets it, by `ckpt_path="last"`. `pytest -m exhaustive -s` prints the counts.
"""

import os
import random
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_parallel import ZeroStrategy
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO
from tests.models import build, loaders
from tests.ranks import POOL, free_port
from tests.strategies.test_checkpoint_sweep import STEPS, Progress, steps_of, wait_until_it_trains
from tests.trainers import trainer

pytestmark = [pytest.mark.launched, pytest.mark.exhaustive]

RANKS, KILLS, FLIPS = 2, 8, 100
SHARDED = "ModelParallelStrategy, sharded"
LIMIT_SECONDS = 40.0
"""A run that has not ended so long after a kill hangs; the backend's timeout, half an hour by default, is longer."""


class Linears(LightningModule):
    """Plain layers, sharded by hand, as ModelParallelStrategy wants it; each rank writes and reads its own part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def linears() -> tuple[LightningModule, DataLoader[Any]]:
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return Linears(), DataLoader(data, 8 // RANKS, shuffle=True)


def gpt() -> tuple[LightningModule, DataLoader[Any]]:
    return build("gpt", n_layers=2), loaders("gpt", 8 // RANKS, samples=16, shuffle=True).train


def weights(model: LightningModule) -> dict[str, Tensor]:
    """Whole ones, on all ranks: where they are sharded, all gather them."""
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


STRATEGIES: dict[str, tuple[Callable[[], Any], str | None]] = {
    "DDPStrategy": (DDPStrategy, "last"),
    SHARDED: (partial(ModelParallelStrategy, RANKS, 1, process_group_backend="gloo"), "last"),
    "ZeroStrategy, full": (partial(ZeroStrategy, 2, resume="auto"), None),
    "ZeroStrategy, sharded": (partial(ZeroStrategy, 2, checkpoint="sharded", resume="auto"), None),
}


def trains(name: str, folder: Path, port: int, rank: int) -> None:
    """One rank of a run that goes on by itself and saves after every step."""
    place = {"LOCAL_RANK": rank, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": RANKS}
    os.environ.update({key: str(value) for key, value in place.items()})
    said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make, ckpt_path = STRATEGIES[name]
    try:
        model, batches = linears() if name == SHARDED else gpt()
        often = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
        run = Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=make(),
            callbacks=[often, Progress(folder / "progress")],
            max_epochs=STEPS // 2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        run.fit(model, batches, ckpt_path=ckpt_path)
        end = weights(model)
        if rank == 0:
            torch.save(end, folder / "result.new")
            (folder / "result.new").rename(folder / "result")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def started(name: str, folder: Path) -> list[BaseProcess]:
    port, context = free_port(), get_context("forkserver")
    made = [context.Process(target=trains, args=(name, folder, port, rank)) for rank in range(RANKS)]
    for process in made:
        process.start()
    return made


def hangs(ranks: list[BaseProcess]) -> bool:
    """Whether they do not end."""
    deadline = time.monotonic() + LIMIT_SECONDS
    for each in ranks:
        each.join(max(0.0, deadline - time.monotonic()))
    found = any(each.exitcode is None for each in ranks)
    for each in ranks:
        each.kill()
        each.join()
    return found


def end_of(name: str, folder: Path, seen: Counter[str], chance: random.Random, seconds: float, kills: int) -> int:
    """Starts a run again until it ends; the kills it took."""
    done = 0
    while not (folder / "result").exists():
        before = steps_of(folder)
        ranks = started(name, folder)
        wait_until_it_trains(ranks, folder, len(before))
        begun = steps_of(folder)[len(before) :]
        if not begun:
            hangs(ranks)
            if (folder / "result").exists():  # nothing was left to train
                return done
            if "EADDRINUSE" in (folder / "said-0").read_text():  # another program took the port
                continue
            seen["could not go on from the newest checkpoint"] += 1
            said = [line for line in (folder / "said-0").read_text().splitlines() if "Error" in line]
            print(f"{name}: after {before}: {said[-1:]}")
            return done
        seen["began anew beside a step that was saved"] += begun[0] == 0 and max(before, default=0) > 1
        if done < kills:
            time.sleep(chance.uniform(0, seconds))
            victim = chance.choice(ranks)
            if victim.exitcode is None:
                os.kill(victim.pid, signal.SIGKILL)
                done += 1
        seen["did not end after a kill"] += hangs(ranks)
    return done


@pytest.mark.parametrize("name", STRATEGIES)
def test_kills(name: str, tmp_path: Path) -> None:
    POOL.warm_up()
    chance, seen = random.Random(name), Counter[str]()
    (whole := tmp_path / "whole").mkdir()
    ranks = started(name, whole)
    wait_until_it_trains(ranks, whole, 0)
    start = time.monotonic()
    assert not hangs(ranks), (whole / "said-0").read_text()
    seconds, expected = time.monotonic() - start, torch.load(whole / "result", weights_only=True)
    kills = runs = 0
    while kills < KILLS:
        (folder := tmp_path / str(runs)).mkdir()
        kills += end_of(name, folder, seen, chance, seconds, KILLS - kills)
        runs += 1
        if (folder / "result").exists():
            found = torch.load(folder / "result", weights_only=True)
            seen["ended with other weights"] += any(not found[key].equal(value) for key, value in expected.items())
    print(f"{name}: {kills} kills in {runs} runs; {dict(seen)}")


@pytest.mark.filterwarnings("ignore")
def test_flipped_bits(tmp_path: Path) -> None:
    """Of a file that Lightning wrote on a single device, read as Lightning and as this package do."""
    whole, path, seen, chance = tmp_path / "whole.ckpt", tmp_path / "flipped.ckpt", Counter[str](), random.Random(0)
    run = trainer(max_steps=1)
    run.fit(build("gpt", n_layers=2), loaders("gpt", 4, samples=4).train)
    run.save_checkpoint(whole)
    AtomicCheckpointIO().save_checkpoint(torch.load(whole, weights_only=True), tmp_path / "ours.ckpt")
    for name, file, io in (
        ("Lightning's", whole, TorchCheckpointIO()),
        ("ours", tmp_path / "ours.ckpt", AtomicCheckpointIO()),
    ):
        for _ in range(FLIPS):
            data = bytearray(file.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
            try:
                io.load_checkpoint(path, weights_only=True)
                seen[f"{name} loaded without a word"] += 1
            except Exception:
                seen[f"{name} refused"] += 1
    print(dict(seen))
