"""The command: `python -m tests.compatibility.packages [NAME ...]`.

Trains modules of other packages, where these are installed, as their users do: on one device, and on two CPU ranks
under data parallelism and ZeRO 1 to 3, in double precision. One device reads batches of 8 samples, two ranks of 4 each;
weights and logged values are compared at the end. Each package runs in a process of its own, which imports the package
before lightning_parallel: some are for `lightning`, some for `pytorch_lightning`. The command fails if a result is
neither "exact" nor a package that is not installed or cannot be imported.

Adam's steps hardly depend on the size of gradients, which is what a wrong loss gets wrong, so modules train by SGD.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8  # samples of all ranks
WEIGHTS = 1e-8  # relative to the largest element of a tensor
LOGGED = 1e-6  # some metrics compute in single precision, whatever comes in
LIMIT = 500  # seconds of one package
Fit = tuple[Any, tuple[DataLoader, ...]]  # a module, and the loaders for `Trainer.fit`
Run = tuple[dict[str, Tensor], dict[str, float]]  # full weights, and the values that were logged last


def sim_clr(batch: int) -> Fit:
    """The loss gathers negatives of all ranks, as lightly advises; batches of other sizes have other statistics."""
    import pytorch_lightning as lightning
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class SimCLR(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )
            self.projection_head = SimCLRProjectionHead(6, 8, 4, batch_norm=False)
            self.criterion = NTXentLoss(gather_distributed=True)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            first, second = (self.projection_head(self.backbone(view)) for view in batch)
            loss: Tensor = self.criterion(first, second)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)

    images = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return SimCLR(), (DataLoader(TensorDataset(images, images.flip(-1) * 0.9), batch),)


def classification_routine(batch: int) -> Fit:
    """The routine makes its optimizer in `__init__`."""
    from torch_uncertainty.routines import ClassificationRoutine

    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    module = ClassificationRoutine(
        model,
        num_classes=3,
        loss=nn.CrossEntropyLoss(),
        optim_recipe=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    return module, (DataLoader(data, batch), DataLoader(data, batch))


PACKAGES: dict[str, Callable[[int], Fit]] = {
    "lightly": sim_clr,
    "torch_uncertainty": classification_routine,
}


def main() -> None:
    chosen = arguments()
    if chosen.here:
        sys.exit(not all(compare_here(name, PACKAGES[name]) for name in chosen.names))
    codes = []
    for name in chosen.names:
        if find_spec(name):
            command = [sys.executable, "-m", "tests.compatibility.packages", "--here", name]
            codes.append(subprocess.run(command, timeout=LIMIT, check=False).returncode)
        else:
            print(f"{name}: not installed")
    sys.exit(any(codes))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility.packages", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PACKAGES)}; all without one")
    parser.add_argument("--here", action="store_true", help="in this process, which must not have imported Lightning")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in PACKAGES]
    if unknown:
        parser.error(f"{', '.join(unknown)} is none of {', '.join(PACKAGES)}")
    chosen.names = chosen.names or list(PACKAGES)
    return chosen


def compare_here(name: str, make: Callable[[int], Fit]) -> bool:
    """Trains everywhere and prints a line for each layout; whether all are exact."""
    torch.set_num_threads(1)  # as on each rank
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        alone = seeded(make, BATCH)  # imports the package, before lightning_parallel
    except ImportError as error:
        print(f"{name:26} cannot be imported: {last_line(error)}")
        return True
    before = {key: value.clone() for key, value in alone[0].state_dict().items()}
    expected = fitted(*alone, "auto", 1)
    if all(torch.equal(before[key], value) for key, value in expected[0].items()):
        raise AssertionError(f"{name} has the same weights after training; nothing could differ")
    from lightning_parallel import DataParallelStrategy, ZeroStrategy

    zero = [partial(ZeroStrategy, stage=stage, start_method="fork") for stage in (1, 2, 3)]
    said = [result(expected, make, each) for each in (partial(DataParallelStrategy, start_method="fork"), *zero)]
    for layout, text in zip(("dp", "zero1", "zero2", "zero3"), said, strict=True):
        print(f"{name:26} {layout:6} {text}", flush=True)
    return all(text == "exact" for text in said)


def result(expected: Run, make: Callable[[int], Fit], strategy: Callable[[], Any]) -> str:
    from tests.curves import compare_series, compare_weights

    try:
        found = fitted(*seeded(make, BATCH // 2), strategy(), 2)
    except Exception as error:
        return f"refused: {last_line(error)}"
    try:
        compare_weights(expected[0], found[0], WEIGHTS)
        compare_series("end", [expected[1]], [found[1]], LOGGED)
    except AssertionError as error:
        return f"differs: {last_line(error)}"
    return "exact"


def seeded(make: Callable[[int], Fit], batch: int) -> Fit:
    """Makes a case; metrics take the default type for their states, also those that are losses."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    module, loaders = make(batch)
    torch.set_default_dtype(torch.float32)
    return module.double(), loaders


def fitted(module: Any, loaders: tuple[DataLoader, ...], strategy: Any, devices: int) -> Run:
    from lightning_parallel.strategies.lightning_package import Trainer

    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    run = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 2, "num_sanity_val_steps": 0}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(devices=devices, strategy=strategy, default_root_dir=folder, **silent, **run)
        trainer.fit(module, *loaders)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return weights, {name: float(value) for name, value in trainer.callback_metrics.items()}


def last_line(error: Exception) -> str:
    """Drops the traceback that the error of a rank starts with."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


if __name__ == "__main__":
    main()
