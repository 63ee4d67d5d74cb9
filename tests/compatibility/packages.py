"""The command: `python -m tests.compatibility.packages [NAME ...]`.

Trains modules of other packages, where these are installed, as their users do: on one device, and on two CPU ranks
under data parallelism and ZeRO 1 to 3, in double precision. One device reads batches of 8 samples, two ranks of 4 each;
weights and logged values are compared at the end. Each package runs in a process of its own, which imports the package
before lightning_parallel: some are for `lightning`, some for `pytorch_lightning`. The command fails if a result is
neither "exact" nor a package that is not installed or cannot be imported.

Adam's steps hardly depend on the size of gradients, which is what a wrong loss gets wrong, so modules train by SGD, or
by an Adam with a large epsilon.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
MOLECULES = ("C", "CC", "CCO", "CCN", "c1ccccc1", "CC(=O)O", "C1CCCCC1", "CC#N", "OCCO", "CCCl", "CN(C)C", "C=CC=C")

Fit = tuple[Any, tuple[DataLoader, ...]]  # a module, and the loaders for `Trainer.fit`


@dataclass(frozen=True)
class Run:
    """What training leaves: full weights, and the values that were logged last."""

    weights: dict[str, Tensor]
    logged: dict[str, float]


def series(batch: int, **options: Any) -> tuple[Any, tuple[DataLoader, ...]]:
    """A dataset of 32 windows on four series, and its loaders."""
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet

    length, names = 15, ["a", "b", "c", "d"]
    noise = torch.randn(len(names) * length, generator=torch.Generator().manual_seed(1)).tolist()
    rows = [(name, time) for name in names for time in range(length)]
    table = pandas.DataFrame(rows, columns=["series", "time"])
    table["value"] = [10 + time % 4 + each for (_, time), each in zip(rows, noise, strict=True)]
    training = TimeSeriesDataSet(
        table,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=6,
        max_prediction_length=2,
        time_varying_unknown_reals=["value"],
        **options,
    )
    validation = TimeSeriesDataSet.from_dataset(training, table, predict=True, stop_randomization=True)
    train_loader = training.to_dataloader(train=True, batch_size=batch, shuffle=False)
    return training, (train_loader, validation.to_dataloader(train=False, batch_size=batch))


def temporal_fusion_transformer(batch: int) -> Fit:
    from pytorch_forecasting import GroupNormalizer, TemporalFusionTransformer
    from pytorch_forecasting.metrics import QuantileLoss

    dataset, loaders = series(
        batch,
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        target_normalizer=GroupNormalizer(groups=["series"], transformation="softplus"),
        add_relative_time_idx=True,
        add_target_scales=True,
        add_encoder_length=True,
    )
    module = TemporalFusionTransformer.from_dataset(
        dataset,
        learning_rate=0.02,
        hidden_size=8,
        attention_head_size=2,
        hidden_continuous_size=4,
        dropout=0.0,
        loss=QuantileLoss(),
        optimizer="sgd",
    )
    return module, loaders


def n_beats(batch: int) -> Fit:
    from pytorch_forecasting import NBeats

    dataset, loaders = series(batch)
    module = NBeats.from_dataset(
        dataset, learning_rate=0.02, widths=[8, 16], backcast_loss_ratio=0.1, dropout=0.0, optimizer="sgd"
    )
    return module, loaders


def message_passing(batch: int) -> Fit:
    from chemprop import data, models
    from chemprop import nn as layers

    class Molecules(models.MPNN):
        """Computes in double precision, with an Adam whose steps depend on the size of gradients."""

        def on_after_batch_transfer(self, batch: data.TrainingBatch, dataloader_idx: int) -> data.TrainingBatch:
            batch.bmg.V, batch.bmg.E = batch.bmg.V.double(), batch.bmg.E.double()
            return batch

        def configure_optimizers(self) -> dict[str, Any]:
            configured: dict[str, Any] = super().configure_optimizers()
            configured["optimizer"].param_groups[0]["eps"] = 1.0
            return configured

    smiles = [left + right for left in MOLECULES[:4] for right in MOLECULES[4:]]  # 4 x 8 = 32 molecules
    points = [data.MoleculeDatapoint.from_smi(each, [float(len(each))]) for each in smiles]
    dataset = data.MoleculeDataset(points)
    dataset.normalize_targets()
    module = Molecules(
        layers.BondMessagePassing(d_h=8, depth=2),
        layers.MeanAggregation(),
        layers.RegressionFFN(input_dim=8, hidden_dim=8),
        metrics=[layers.metrics.RMSE(), layers.metrics.MAE()],
        warmup_epochs=1,
        init_lr=0.1,
        max_lr=0.5,
        final_lr=0.1,
    )
    loaders = [data.build_dataloader(dataset, batch, num_workers=0, shuffle=False) for _ in range(2)]
    return module, tuple(loaders)


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


PACKAGES: dict[str, dict[str, Callable[[int], Fit]]] = {
    "pytorch_forecasting": {"TemporalFusionTransformer": temporal_fusion_transformer, "NBeats": n_beats},
    "chemprop": {"MPNN": message_passing},
    "lightly": {"SimCLR": sim_clr},
    "torch_uncertainty": {"ClassificationRoutine": classification_routine},
}


def main() -> None:
    chosen = arguments()
    if chosen.here:
        exact = [compare_here(*pair) for name in chosen.names for pair in PACKAGES[name].items()]
        sys.exit(not all(exact))
    failed = [name for name in chosen.names if find_spec(name) and not passes(name)]
    for name in chosen.names:
        if not find_spec(name):
            print(f"{name}: not installed")
    sys.exit(bool(failed))


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


def passes(name: str) -> bool:
    command = [sys.executable, "-m", "tests.compatibility.packages", "--here", name]
    return subprocess.run(command, timeout=LIMIT, check=False).returncode == 0


def compare_here(name: str, make: Callable[[int], Fit]) -> bool:
    """Trains everywhere and prints a line for each layout; whether all are exact."""
    quiet()
    try:
        alone = seeded(make, BATCH)  # imports the package, before lightning_parallel
    except ImportError as error:
        print(f"{name:26} cannot be imported: {last_line(error)}")
        return True
    before = {key: value.clone() for key, value in alone[0].state_dict().items()}
    expected = fitted(*alone, "auto", 1)
    if all(torch.equal(before[key], value) for key, value in expected.weights.items()):
        raise AssertionError(f"{name} has the same weights after training; nothing could differ")
    results = {layout: result(expected, make, strategy) for layout, strategy in layouts()}
    for layout, said in results.items():
        print(f"{name:26} {layout:6} {said}", flush=True)
    return all(said == "exact" for said in results.values())


def layouts() -> Iterator[tuple[str, Any]]:
    from lightning_parallel import DataParallelStrategy, ZeroStrategy

    yield "dp", partial(DataParallelStrategy, start_method="fork")
    for stage in (1, 2, 3):
        yield f"zero{stage}", partial(ZeroStrategy, stage=stage, start_method="fork")


def result(expected: Run, make: Callable[[int], Fit], strategy: Callable[[], Any]) -> str:
    from tests.curves import compare_series, compare_weights

    try:
        found = fitted(*seeded(make, BATCH // 2), strategy(), 2)
    except Exception as error:
        return f"refused: {last_line(error)}"
    try:
        compare_weights(expected.weights, found.weights, WEIGHTS)
        compare_series("end", [expected.logged], [found.logged], LOGGED)
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

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            precision="64-true",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=folder,
        )
        trainer.fit(module, *loaders)
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return Run(weights, {name: float(value) for name, value in trainer.callback_metrics.items()})


def last_line(error: Exception) -> str:
    """Drops the traceback that the error of a rank starts with."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def quiet() -> None:
    """Silences Lightning, and gives each rank one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    main()
