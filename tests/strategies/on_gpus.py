"""A user's script that trains on GPUs and compares with one: on_gpus.py STRATEGY ACCELERATOR DEVICES FOLDER.

DEVICES is a number, or "shared" for two ranks on one GPU. All draw weights with its generator, as Lightning does.
The module makes tensors on `self.device`, counts in metrics, and logs numbers and tensors of the host, as users do.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_parallel import DataParallelStrategy, PipelineParallelStrategy, TensorParallelStrategy, ZeroStrategy

STRATEGIES: dict[str, Any] = {
    "data_parallel": DataParallelStrategy,
    "zero1": partial(ZeroStrategy, stage=1),
    "zero2_offload": partial(ZeroStrategy, stage=2, offload=True),
    "zero3": ZeroStrategy,
    "zero3_offload": partial(ZeroStrategy, offload=True),
    "tensor_parallel": TensorParallelStrategy,
    "pipeline_parallel": PipelineParallelStrategy,
    "zbv": partial(PipelineParallelStrategy, schedule="zbv", microbatches=4),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.stem, self.layers = nn.Linear(8, 16), nn.ModuleList(Block() for _ in range(4))
            self.head, self.scale = nn.Linear(16, 4), nn.Parameter(torch.ones(16))
            self.register_buffer("shift", torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + torch.arange(16, device=self.device) / 16
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale + self.shift)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("mean", self.mean(loss), on_step=True, on_epoch=True)
        self.log_dict({"loss": loss, "number": 1.5, "on_host": loss.detach().cpu()}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))
        self.log("samples", torch.tensor(float(len(batch[0]))), reduce_fx="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(batch_size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    features, labels = torch.randn(44, 8, generator=generator), torch.randint(4, (44,), generator=generator)
    return DataLoader(TensorDataset(features, labels), batch_size)


def train(
    folder: Path, batch_size: int, make_strategy: Callable[[], Any] = lambda: "auto", **place: Any
) -> dict[str, float]:
    """Fits, goes on from the file in a new module, and says what was logged; the module must be back on the host."""
    torch.manual_seed(0)
    seen: dict[str, float] = {}
    file = None
    for epochs in (2, 3):
        module, saving = Classifier(), ModelCheckpoint(folder, monitor="val_loss", enable_version_counter=False)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        run = {"max_epochs": epochs, "gradient_clip_val": 0.5, "callbacks": [saving]}
        trainer = Trainer(strategy=make_strategy(), **run, **quiet, **place)
        trainer.fit(module, loader(batch_size), loader(batch_size), ckpt_path=file)
        seen |= {f"{epochs} {name}": float(value) for name, value in trainer.callback_metrics.items()}
        file = saving.best_model_path
        assert {parameter.device.type for parameter in module.parameters()} == {module.device.type} == {"cpu"}
    return seen


def main() -> None:
    name, accelerator, devices, folder = sys.argv[1:]
    shared = {"parallel_devices": [torch.device("cuda", 0)] * 2} if devices == "shared" else {}
    ranks = 2 if shared else int(devices)
    readers = 1 if name in ("tensor_parallel", "pipeline_parallel", "zbv") else ranks
    launched = "LOCAL_RANK" in os.environ
    expected = {} if launched else train(Path(folder) / "one", 8, accelerator=accelerator, devices=1)
    place = {"accelerator": accelerator, "devices": 1 if shared else ranks}
    found = train(Path(folder) / "ranks", 8 // readers, partial(STRATEGIES[name], **shared), **place)
    if launched:
        return
    assert expected.keys() == found.keys(), (expected, found)
    wrong = {key: (value, found[key]) for key, value in expected.items() if abs(found[key] - value) > 1e-4 * abs(value)}
    assert not wrong, wrong
    print("equal", flush=True)


if __name__ == "__main__":
    main()
