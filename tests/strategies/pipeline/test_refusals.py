"""What no pipeline can run is refused on every rank with the rule and the remedy; what is no state is not."""

import random
import re
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    HybridStrategy,
    PipelineParallel,
    PipelineParallelStrategy,
    ZeroStrategy,
)
from tests.further.points import WIDTH, Handwritten
from tests.models import PlainBlock, points
from tests.ranks import RanksFailed, run_on_ranks
from tests.strategies.one_and_two import PIPELINE, MakeStrategy, assert_like_one_device, made
from tests.strategies.pipeline.test_unusual_stages import Shares
from tests.tiers import sampled
from tests.trainers import trainer

ZBV_OF_TWO = partial(PipelineParallelStrategy, 2, schedule="zbv")


def run(make: Any, strategy: Any, **options: Any) -> dict[str, float]:
    fitting, data = trainer(made(strategy), **({"max_epochs": 1} | options)), DataLoader(points(32, seed=1), 8)
    fitting.fit(make(), data, data)
    return {name: float(value) for name, value in fitting.callback_metrics.items()}


def error_of(make: Any, strategy: Any, **options: Any) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        run(make, strategy, **options)
    return str(caught.value)


class Manual(Handwritten):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OneDirection(Handwritten):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NoList(Handwritten):
    def make(self) -> None:
        self.first, self.second = nn.Linear(13, 7), nn.Linear(7, 1)

    def loss(self, batch: Any) -> Tensor:
        return self.second(self.first(batch[0])).mean()


def pruned(strategy: MakeStrategy) -> str:
    return error_of(Handwritten, strategy, callbacks=[ModelPruning("l1_unstructured", amount=0.5)])


PRUNING = "ModelPruning replaces parameters by full tensors and masks"
KEPT_APART = r"a tensor that was made in block (.|\n)*choose a split with both on one stage"
CASES: list[tuple[Any, str]] = [
    (partial(error_of, Manual, PIPELINE), "Manual uses manual optimization"),
    (partial(error_of, OneDirection, PIPELINE), "LBFGS is not known to step each parameter by itself"),
    (partial(error_of, NoList, PIPELINE), r"NoList .*blocks="),
    (partial(error_of, partial(Handwritten, blocks=3), ZBV_OF_TWO), r"4 stages .* has 3"),
    (partial(error_of, Handwritten, partial(PIPELINE, split=(3, 2))), r"split=\(3, 2\) .* 4 blocks"),
    (partial(error_of, Shares, partial(PIPELINE, split=(2, 2))), KEPT_APART),
    *(
        (
            partial(error_of, Handwritten, partial(HybridStrategy, PipelineParallel(2, schedule="zbv"), other)),
            r"zbv.* twice; choose a schedule such as '1f1b'",
        )
        for other in (ActivationCheckpoint(), Compile())
    ),
    (partial(pruned, PIPELINE), PRUNING),
    (partial(pruned, ZeroStrategy), PRUNING),
]


def errors() -> list[str]:
    return [case() for case, _ in CASES]


def test_refusals_before_the_first_step_or_in_it() -> None:
    for said in run_on_ranks(2, errors):
        for message, (_, words) in zip(said, CASES, strict=True):
            assert re.search(words, message), message


class Scales(Handwritten):
    """Scales what comes to its blocks, and evaluates with what other stages have, in one of several ways."""

    def __init__(self, evaluation: str = "") -> None:
        super().__init__()
        self.evaluation = evaluation

    def make(self) -> None:
        super().make()
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))

    def body(self, x: Tensor) -> Tensor:
        first = x * self.scale
        x = super().body(first)
        if self.training or not self.evaluation:
            return x
        if self.evaluation == "scales again":
            return x * self.scale
        if self.evaluation == "skips":
            return x + first
        if self.evaluation == "asks":
            return x * (2.0 if float(first.sum()) > 0 else 1.0)
        return x @ self.blocks[0].down.weight @ self.blocks[0].up.weight


class Penalizes(Scales):
    """Adds a penalty on a weight of the first stage for some samples of the second batch, in its second half."""

    def loss(self, batch: Any) -> Tensor:
        marked = batch[2] > 0
        loss = super().loss(batch)
        return loss + marked.float().mean() * self.stem.weight.square().sum() if marked.any() else loss


def penalized() -> None:
    inputs, targets, _ = points(16, seed=3).tensors
    loader = DataLoader(TensorDataset(inputs, targets, (torch.arange(16) > 13).int()), 8)
    trainer(PIPELINE(), max_epochs=1).fit(Penalizes(), loader, loader)


def test_weight_of_another_stage_that_a_later_microbatch_reads() -> None:
    """It was zeros there, and the loss another one, without a word."""
    words = r"stem\.weight \(of stage 0\) is .*, but another stage of the pipeline has it"
    with pytest.raises(RanksFailed, match=words):
        run_on_ranks(2, penalized)


class Sometimes(Handwritten):
    """Runs its blocks in the other order in its second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in reversed(self.blocks) if batch_idx else self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class SkipsBlocks(Handwritten):
    """Skips a batch before its blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


ELSEWHERE = "but another stage of the pipeline has it: .* or use ZeroStrategy"


@sampled(
    1,
    ("make", "said"),
    [
        (partial(Scales, "scales again"), rf"scale \(of stage 0\) is read, {ELSEWHERE}"),
        (partial(Scales, "skips"), rf"stem.bias \(of stage 0\) is read, {ELSEWHERE}"),
        (partial(Scales, "asks"), rf"stem.bias \(of stage 0\) is read, {ELSEWHERE}"),
        (partial(Scales, "reads weights"), rf"blocks\.0\.down\.weight \(of stage 0\) is read, {ELSEWHERE}"),
        (Sometimes, r"block blocks\.3 was called where the analyzed step called blocks\.0"),
        (SkipsBlocks, "to skip a batch, run them and return the loss times zero"),
    ],
    ids=["scales again", "skips", "asks", "reads weights", "sometimes", "skips blocks"],
)
def test_refusals_during_a_later_step(make: Any, said: str) -> None:
    with pytest.raises(RanksFailed, match=said):
        run_on_ranks(2, run, make, PIPELINE)


class Reduces(Handwritten):
    """Logs what Lightning does not reduce."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("ordered", loss, reduce_fx=sorted)
        return loss


class SkipsOne(Handwritten):
    """Has no loss for some samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch[0][0, 0] > 0 else loss


class SometimesBySamples(Handwritten):
    """Has a mean over targets for some samples, and one over samples for others."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.body(self.stem(batch[0])))
        return logits.square().mean() if batch[0][0, 0] > 0 else F.cross_entropy(logits, batch[1])


class ReturnsUnsendable(Handwritten):
    """Returns what no other rank can get."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "more": lambda: batch}


@sampled(
    2,
    ("make", "said"),
    [
        (Reduces, r"Only `self.log\(..., reduce_fx=\{min,max,mean,sum\}\)` are supported"),
        (SkipsOne, r"returned no loss for microbatches \[\d.*a pipeline skips only full batches"),
        (SometimesBySamples, r"computed a mean over targets for microbatches \[\d.*decide it by batch_idx"),
        (ReturnsUnsendable, r"what a step returned, .* cannot be sent to other ranks \(.*lambda"),
    ],
)
def test_error_of_what_the_last_stage_makes_is_on_all_ranks(make: Any, said: str) -> None:
    first, second = run_on_ranks(2, error_of, make, PIPELINE)
    assert first == second
    assert re.search(said, first), first


class Encoder(Handwritten):
    """Torch's own, which lets its layers compute with nested tensors where it evaluates samples of other lengths."""

    def make(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.stem, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.encoder = nn.TransformerEncoder(layer, 4)

    def loss(self, batch: list[Tensor]) -> Tensor:
        ids = batch[0]
        logits = self.head(self.encoder(self.stem(ids), src_key_padding_mask=ids == 0))
        return F.cross_entropy(logits.transpose(1, 2), ids, ignore_index=0)


def encode() -> None:
    ids = torch.arange(96).view(16, 6) % 10 + 1
    ids[::2, 4:] = 0
    data = DataLoader(TensorDataset(ids), 8)
    trainer(PIPELINE(), max_epochs=1).fit(Encoder(), data, data)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_evaluation_with_nested_tensors() -> None:
    with pytest.raises(RanksFailed, match=r"a nested tensor, which has no single shape .* enable_nested_tensor=False"):
        run_on_ranks(2, encode)


class Tables(PlainBlock):
    """Makes a table when it is first called, on which nothing depends, and leaves itself out now and then."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 13)

    def forward(self, x: Tensor) -> Tensor:
        if "table" not in vars(self):
            self.table = torch.linspace(0, 1, x.shape[-1])
        kept = random.random() < 0.5, bool(torch.rand(()) < 0.5), numpy.random.rand() < 0.5
        return x + sum(kept) * super().forward(x * self.table)


class Draws(Handwritten):
    """Calls its blocks between steps too."""

    def make_blocks(self) -> nn.Module:
        return nn.ModuleList(Tables() for _ in range(4))

    def on_train_batch_end(self, *_: Any) -> None:
        self.body(torch.ones(1, WIDTH))


def test_tables_random_numbers_and_calls_between_steps_are_fine() -> None:
    run_on_ranks(2, run, Draws, PIPELINE)


class Logs(Scales):
    """Logs what only its first stage has."""

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.log("first", x.mean(), on_step=False, on_epoch=True)
            self.log("scale", self.scale.sum())
        return super().body(x)


def test_values_that_only_the_first_stage_has_are_logged() -> None:
    assert_like_one_device(run, 2, (Logs, None), (Logs, PIPELINE))
