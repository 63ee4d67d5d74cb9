"""What a training run leaves: its losses, metrics and weights; and the comparison of two runs.

The parity table in one line: `check_parity("llama", 4, partial(ZeroStrategy, 4), data_ranks=4)`.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torchmetrics import Metric

from tests.models import Loaders, build, loaders
from tests.ranks import begun_on_one, on_one, run_on_ranks
from tests.trainers import trainer

SMALL = 1e-2  # tensors and metrics smaller than this are compared as if they were this large
RUN = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


@dataclass(frozen=True)
class Curve:
    """One training run: the loss of each batch, what was logged by the end of each epoch, the weights after it."""

    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Recorder(Callback):
    """Reads the losses from what was logged: under data parallelism a step's own loss is only that rank's part."""

    def __init__(self) -> None:
        self.curve = Curve()

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Metrics compute in double precision too, as the trainer does: moving them to a device makes them single."""
        if trainer.precision == "64-true":
            for metric in [part for part in module.modules() if isinstance(part, Metric)]:
                metric.set_dtype(torch.float64)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.curve.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        shown = {f"bar/{name}": value for name, value in trainer.progress_bar_metrics.items()}
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.curve.metrics.append(logged | shown)


def curve(make_trainer: Callable[..., Trainer], model: LightningModule, data: Loaders) -> Curve:
    """Fits the model and says what happened; `make_trainer` takes `callbacks`."""
    recorder = Recorder()
    torch.manual_seed(0)  # a model may be built only now, in configure_model
    make_trainer(callbacks=[recorder]).fit(model, *data)
    recorder.curve.weights.update({name: whole(name, value) for name, value in model.state_dict().items()})
    return recorder.curve


def whole(name: str, value: Tensor) -> Tensor:
    assert type(value) in (Tensor, torch.nn.Parameter), f"{name} is a {type(value).__name__} after fit, not whole"
    return value.detach().cpu().clone()


def train(
    column: str,
    make_strategy: Callable[[], Strategy] | str = "auto",
    *,
    data_ranks: int = 1,
    global_batch: int = 8,
    model: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    **run: Any,
) -> Curve:
    """Trains a column on the global batch, of which each of `data_ranks` ranks takes its part."""
    if isinstance(make_strategy, str):  # Lightning's own: it warns wherever a process group exists, even of one rank
        warnings.filterwarnings("ignore", ".*sync_dist=True")
    strategy = make_strategy if isinstance(make_strategy, str) else make_strategy()
    make_trainer = functools.partial(trainer, strategy, **(RUN | run))
    return curve(
        make_trainer, build(column, **(model or {})), loaders(column, global_batch // data_ranks, **(data or {}))
    )


def reference(column: str, **options: Any) -> Curve:
    """The same run in one process; computed once per session."""
    curve: Curve = on_one(train, column, **options)
    return curve


def check_parity(
    column: str,
    n: int,
    make_strategy: Callable[[], Strategy],
    *,
    data_ranks: int = 1,
    rtol: float = 1e-5,
    **options: Any,
) -> None:
    """Trains on `n` ranks and in one process, and holds every rank to the one process's curve."""
    expected = begun_on_one(train, column, **options)
    for rank, got in enumerate(run_on_ranks(n, train, column, make_strategy, data_ranks=data_ranks, **options)):
        compare(expected.result(), got, rtol, where=f"rank {rank}: ")


def compare(reference: Curve, got: Curve, rtol: float = 1e-5, where: str = "") -> None:
    """Raises an AssertionError that names the first step, metric or weight that differs, with both values.

    Weights may differ ten times as much: AdamW divides a small gradient by its own size, its rounding included.
    """
    losses = [{"train_loss": loss} for loss in reference.losses], [{"train_loss": loss} for loss in got.losses]
    compare_series(f"{where}step", *losses, rtol)
    # moved to a device, which a pipeline does at the first batch, torchmetrics add up in single precision again
    compare_series(f"{where}epoch", reference.metrics, got.metrics, max(rtol, 1e-7))
    compare_weights(reference.weights, got.weights, 10 * rtol, where)


def compare_series(
    unit: str, reference: Sequence[Mapping[str, float]], got: Sequence[Mapping[str, float]], rtol: float
) -> None:
    for number, (wanted, found) in enumerate(zip(reference, got, strict=False)):
        require_names(f"{unit} {number} logged", wanted, found)
        for name, value in wanted.items():
            if not math.isclose(found[name], value, rel_tol=rtol, abs_tol=rtol * SMALL):
                raise AssertionError(f"{unit} {number}: {name} is {found[name]!r}, the reference has {value!r}")
    if len(reference) != len(got):
        raise AssertionError(f"{len(got)} {unit}(s), the reference has {len(reference)}")


def compare_weights(reference: Mapping[str, Tensor], got: Mapping[str, Tensor], rtol: float, where: str = "") -> None:
    require_names(f"{where}the weights", reference, got)
    for name, wanted in reference.items():
        found = got[name]
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            shapes = f"{tuple(found.shape)} {found.dtype}, the reference has {tuple(wanted.shape)} {wanted.dtype}"
            raise AssertionError(f"{where}weight {name} is {shapes}")
        if not wanted.numel():
            continue
        difference = (found.double() - wanted.double()).abs()
        allowed = rtol * max(wanted.double().abs().max().item(), SMALL)
        if not difference.max() <= allowed:
            raise AssertionError(f"{where}weight {name} {worst(wanted, found, difference)}, allowed {allowed:.2g}")


def worst(wanted: Tensor, found: Tensor, difference: Tensor) -> str:
    index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    values = f"is {found[index].item()!r}, the reference has {wanted[index].item()!r}"
    return f"of shape {tuple(wanted.shape)} at {list(index)} {values}: differs by {difference[index].item():.2g}"


def require_names(what: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    if wanted.keys() != found.keys():
        missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        raise AssertionError(f"{what}: missing {missing}, not in the reference {extra}")
