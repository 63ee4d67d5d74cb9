"""One architecture trained once: in one process, or on two ranks under a technique.

Everything is computed in double precision, so that only the order of sums may differ.
"""

import contextlib
import linecache
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_parallel
from lightning_parallel import (
    ContextParallelStrategy,
    DataParallelStrategy,
    ExpertParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeroStrategy,
)
from lightning_parallel.techniques.divided.rules import single  # noqa: F401  (enters the rules in the table)
from lightning_parallel.techniques.divided.table import NAMES, RULES
from tests.compatibility.architectures import IGNORED, Architecture
from tests.curves import Curve, curve
from tests.live import stepped
from tests.rank_process import leave_group
from tests.trainers import trainer

BATCH = 8  # samples of the batch that one process sees


@dataclass(frozen=True)
class Technique:
    """A column of the table: two ranks, and how many of them read different samples."""

    strategy: Callable[[], Strategy]
    readers: int
    padded: bool = False  # some targets are -100, more in some samples than in others


TECHNIQUES = {
    "dp2": Technique(DataParallelStrategy, 2),
    "dp2 padded": Technique(DataParallelStrategy, 2, padded=True),
    "zero3": Technique(lambda: ZeroStrategy(2), 2),
    "pp2": Technique(lambda: PipelineParallelStrategy(2, schedule="1f1b", microbatches=2), 1),
    "tp2": Technique(lambda: TensorParallelStrategy(2), 1),
    "tp2 whole": Technique(lambda: TensorParallelStrategy(2, sequence_parallel=False), 1),
    "cp2": Technique(lambda: ContextParallelStrategy(2), 1),
    "ep2": Technique(lambda: ExpertParallelStrategy(2), 2),
}


@dataclass(frozen=True)
class Failure:
    """How a rank failed; `ours` is a message that says what is refused and what to do."""

    kind: str
    message: str
    ours: bool
    place: str

    @property
    def consequence(self) -> bool:
        return " by peer" in self.message or "another rank" in self.message


@dataclass
class Trained:
    """What a run left on one rank; `share` is the part of the parameters' elements that this rank kept."""

    curve: Curve = field(default_factory=Curve)
    parameters: list[str] = field(default_factory=list)
    share: float = 1.0
    steps: int = 0


class Model(LightningModule):
    """What a user writes around a model of transformers."""

    def __init__(self, architecture: Architecture, shares: Sequence[float] = ()) -> None:
        super().__init__()
        self.shares = shares
        torch.manual_seed(0)
        self.config = architecture.config()
        self.network = architecture.build(self.config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.network(**batch).loss
        if self.shares:
            loss = loss * self.shares[batch_idx]
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(learning, lr=0.05, momentum=0.9)


class Watch(Callback):
    """Counts steps, and what this rank keeps while it trains."""

    def __init__(self, total: int) -> None:
        self.total, self.kept, self.steps = total, total, 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        """Counts the elements that the optimizer steps here; parameters of other stages have no memory."""
        self.steps += 1
        with torch._C.DisableTorchFunctionSubclass():  # as tensors between steps, they compute as the full ones
            given = [
                each._local_tensor if isinstance(each, DTensor) else each for each in stepped(trainer.optimizers[0])
            ]
            self.kept = sum(each.numel() for each in given if each.untyped_storage().nbytes())


def train(architecture: Architecture, technique: str | None, padded: bool, accumulate: int = 1) -> Trained | Failure:
    """Trains three steps; without a technique on this process alone, `accumulate` parts of a batch one by one."""
    with quiet(), doubles_stay():
        try:
            return _train(architecture, TECHNIQUES[technique] if technique else None, padded, accumulate)
        except Exception as error:
            failure = as_failure(error)
            del error
    leave_group()  # frees the other rank
    return failure


def _train(architecture: Architecture, technique: Technique | None, padded: bool, accumulate: int) -> Trained:
    model = Model(architecture, shares_of_parts(architecture, accumulate) if padded and accumulate > 1 else ())
    watch = Watch(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
    size = BATCH // accumulate // (technique.readers if technique else 1)
    data = DataLoader(architecture.data(model.config, padded), size)

    def make_trainer(callbacks: list[Callback]) -> Trainer:
        return trainer(
            technique.strategy() if technique else "auto",
            callbacks=[*callbacks, watch],
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            precision="64-true",
        )

    result = curve(make_trainer, model, (data,))
    return Trained(result, [name for name, _ in model.named_parameters()], watch.kept / watch.total, watch.steps)


def shares_of_parts(architecture: Architecture, parts: int) -> list[float]:
    """By how many of its batch's targets each part of a batch has more than its even part: a mean is over targets."""
    samples = architecture.data(architecture.config(), padded=True)
    labels = [samples[number]["labels"] for number in range(len(samples))]
    shifted = 0 if architecture.family in ("encoder-decoder", "text encoder") else 1
    counts = [int((label[shifted:] != IGNORED).sum()) for label in labels]
    size = BATCH // parts
    of_parts = [sum(counts[start : start + size]) for start in range(0, len(counts), size)]
    batches = [sum(of_parts[number - number % parts :][:parts]) for number in range(len(of_parts))]
    return [parts * part / batch for part, batch in zip(of_parts, batches, strict=True)]


def as_failure(error: Exception) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    root = lightning_parallel.__path__[0]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    said = line.startswith("raise") and last.filename.startswith(root) and isinstance(error, (ValueError, TypeError))
    ours = said and (error.__suppress_context__ or error.__context__ is None) and error.__cause__ is None
    nearest = next((frame for frame in reversed(frames) if frame.filename.startswith(root)), last)
    place = " < ".join(
        f"{frame.filename.split('/lightning_parallel/')[-1]}:{frame.lineno}" for frame in (last, nearest)
    )
    return Failure(type(error).__name__, " ".join(str(error).split()), ours, place)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning_parallel", "transformers", "lightning.pytorch")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@contextlib.contextmanager
def doubles_stay() -> Iterator[None]:
    """Transformers computes losses, norms, routers and weights of attention in single precision, whatever comes in."""
    casts = {name: getattr(Tensor, name) for name in ("float", "type", "to")}
    softmaxes = {name: getattr(F, name) for name in ("softmax", "log_softmax")}
    for name, cast in casts.items():
        setattr(Tensor, name, convert := keeping_doubles(cast, always=name == "float"))
        RULES[convert], NAMES[convert] = RULES[cast], name  # torch asks for rules of what stands in the class
    for name, softmax in softmaxes.items():
        setattr(F, name, normalising_doubles(softmax, getattr(torch, name)))
    try:
        yield
    finally:
        for name in casts:
            delattr(Tensor, name)  # what it inherits is seen again
        for name, softmax in softmaxes.items():
            setattr(F, name, softmax)


def keeping_doubles(cast: Callable[..., Any], always: bool) -> Callable[..., Any]:
    def convert(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked = always or any(each is torch.float32 for each in (*args, kwargs.get("dtype")))
        return tensor if asked and tensor.dtype is torch.float64 else cast(tensor, *args, **kwargs)

    return convert


def normalising_doubles(softmax: Callable[..., Tensor], plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def normalise(tensor: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        return plain(tensor, dim) if tensor.dtype is torch.float64 else softmax(tensor, dim, *args, **kwargs)

    return normalise
