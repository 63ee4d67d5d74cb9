"""What is measured beside training: speed, and the load of experts."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from recipes.moe import MoEModule
from recipes.report import draw_load


class TokensPerSecond(Callback):
    """Logs how many tokens all ranks together train on per second, over the last batches.

    Args:
        window: Number of batches to average over.
    """

    def __init__(self, window: int = 20) -> None:
        self.ends: deque[float] = deque(maxlen=window + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Log the rate since the oldest remembered batch."""
        self.ends.append(perf_counter())
        if len(self.ends) > 1:
            # Ranks that share their samples (in a pipeline, say) count once.
            parts = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
            tokens = batch["input_ids"].numel() * parts * (len(self.ends) - 1)
            pl_module.log("tokens/s", tokens / (self.ends[-1] - self.ends[0]), prog_bar=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget, so that the pause for validation does not count."""
        self.ends.clear()


class ExpertLoad(Callback):
    """Draws at the end how many tokens went to each expert, in ``experts.png``.

    Args:
        dirpath: Folder of the picture.
    """

    def __init__(self, dirpath: str) -> None:
        self.picture = Path(dirpath) / "experts.png"
        self.load: Tensor | None = None
        self.steps = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: MoEModule, *_: Any) -> None:  # type: ignore[override]
        """Add the load of an optimizer step."""
        if trainer.global_step > self.steps and pl_module.load is not None:
            self.steps, load = trainer.global_step, pl_module.load.cpu()
            self.load = load if self.load is None else self.load + load

    def on_train_end(self, trainer: Trainer, pl_module: MoEModule) -> None:  # type: ignore[override]
        """Draw the load of the whole run."""
        if self.load is not None and trainer.is_global_zero:
            draw_load(self.load, pl_module.config.dense_layers, self.picture)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on from."""
        return {"load": self.load, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.load, self.steps = state_dict["load"], state_dict["steps"]
