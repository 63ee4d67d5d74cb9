"""A run from its first step to its predictions, with a stop on the way, on one of several places.

The places are the host, and GPUs: one of each rank's own where there are so many, else shared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer

from tests.curves import Curve, Recorder, compare, compare_series, whole
from tests.models import build, loaders
from tests.ranks import begun_on_one, run_on_ranks
from tests.trainers import PoolEnvironment, trainer

Place = Literal["host", "gpu"]
Make = Callable[..., Any]
RUN: dict[str, Any] = {"precision": "64-true", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


@dataclass(frozen=True)
class Journey:
    """What a run showed: two curves, before and after it stopped, the metrics of a validation, and predictions.

    Attributes:
        predicted: the sums of this rank's predictions and of their squares.
    """

    first: Curve
    second: Curve
    validated: dict[str, float]
    predicted: tuple[float, float]


def journey(
    make: Make | None, readers: int, place: Place, column: str = "gpt", run: Mapping[str, Any] = RUN, **model: Any
) -> Journey:
    """Fits for an epoch, goes on from its checkpoint in a new model, validates and predicts."""
    data = loaders(column, 8 // readers)
    file = Path(os.environ["RANKS_SCRATCH"]) / "stopped.ckpt"
    on_the_way = made(make, place, run, max_epochs=1)
    first = curve(on_the_way, drawn_on_the_host(build(column, **model)), data)
    on_the_way.save_checkpoint(file)
    going_on = made(make, place, run, max_epochs=2)
    module = drawn_on_the_host(build(column, seed=1, **model))
    second = curve(going_on, module, data, ckpt_path=file)
    (metrics,) = going_on.validate(module, data.val, verbose=False)
    predictions = torch.cat([part.double().cpu().flatten() for part in going_on.predict(module, data.val) or []])
    return Journey(first, second, metrics, (predictions.sum().item(), predictions.square().sum().item()))


def drawn_on_the_host(module: LightningModule) -> LightningModule:
    """The module, whose weights are the same in all places: Lightning makes them with the generator of a GPU there."""
    configure = module.configure_model

    def configure_model() -> None:
        with torch.device("cpu"):
            configure()

    module.configure_model = configure_model
    return module


def made(make: Make | None, place: Place, run: Mapping[str, Any], **more: Any) -> Trainer:
    if place != "gpu":
        return trainer("auto" if make is None else make(), **run, **more)
    each = [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(PoolEnvironment().world_size())]
    strategy = "auto" if make is None else make(parallel_devices=each)
    return trainer(strategy, 1, accelerator="cuda", **run, **more)


def curve(trainer: Trainer, module: Any, data: Any, **fit: Any) -> Curve:
    recorder = Recorder()
    trainer.callbacks.append(recorder)
    torch.manual_seed(0)
    module.predict_step = lambda batch, batch_idx: module(batch["input_ids"])
    trainer.fit(module, *data, **fit)
    assert {parameter.device.type for parameter in module.parameters()} == {module.device.type} == {"cpu"}
    recorder.curve.weights.update({name: whole(name, value) for name, value in module.state_dict().items()})
    return recorder.curve


def check_journey(n: int, make: Make, readers: int, place: Place, *, rtol: float, **options: Any) -> list[Journey]:
    """Makes the journey on `n` ranks and in one process on the host, and holds every rank to the latter's.

    Metrics of an evaluation are in single precision, whatever the model computes in.
    """
    expected = begun_on_one(journey, None, 1, "host", **options)
    found: list[Journey] = run_on_ranks(n, journey, make, readers, place, **options)
    wanted: Journey = expected.result()
    for rank, got in enumerate(found):
        compare(wanted.first, got.first, rtol, f"rank {rank}, first: ")
        compare(wanted.second, got.second, rtol, f"rank {rank}, second: ")
        compare_series(f"rank {rank}: validation", [wanted.validated], [got.validated], max(rtol, 1e-6))
    totals = torch.tensor([got.predicted for got in found]).sum(0) * readers / n  # others predict the same samples
    torch.testing.assert_close(totals, torch.tensor(wanted.predicted), rtol=max(rtol, 1e-5), atol=1e-3)
    return found
