"""Trainers that run inside the pool: the processes exist already, so Lightning starts none."""

import os
import tempfile
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import Strategy


class PoolEnvironment(ClusterEnvironment):
    """Reads rank and world size from the variables that the pool sets; one process without them is a world of 1."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return "RANKS_SCRATCH" in os.environ

    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return 0


def trainer(strategy: str | Strategy = "auto", devices: int | None = None, **overrides: Any) -> Trainer:
    """A quiet CPU Trainer over all ranks of the running test; checkpoints go to a folder that the pool empties."""
    environment = PoolEnvironment()
    arguments = {
        "accelerator": "cpu",
        "devices": devices or environment.world_size(),
        "strategy": strategy,
        "plugins": [environment],
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": os.environ.get("RANKS_SCRATCH", tempfile.gettempdir()),
    }
    plugins = [environment, *overrides.pop("plugins", [])]
    return Trainer(**(arguments | overrides | {"plugins": plugins}))
