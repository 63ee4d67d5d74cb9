"""Context parallel on models that users write: attention, recurrences, losses and statistics of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel import (
    ContextParallel,
    ContextParallelStrategy,
    HybridStrategy,
    ParallelPlan,
    TensorParallel,
    Zero,
)
from tests.rank_process import leave_group
from tests.ranks import begun_on_one, ranks, run_on_ranks
from tests.strategies.one_and_two import require_like
from tests.tiers import sampled
from tests.trainers import trainer

WORDS, WIDTH = 19, 16


def tokens(length: int, samples: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, WORDS, (samples, length), generator=generator)


class Model(LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Classifies(Model):
    """Torch's encoder, padding, a mean over what is not padding: a batch that is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, 3)

    def loss(self, batch: Any) -> Tensor:
        words, labels = batch
        h = self.words(words) + self.places.weight[: words.shape[1]]
        h = self.encoder(h, src_key_padding_mask=words == 0)
        there = (words != 0).to(h.dtype)[..., None]
        return F.cross_entropy(self.head((h * there).sum(1) / there.sum(1)), labels)

    @staticmethod
    def batches() -> list[Any]:
        made = []
        for length in (12, 9, 7):
            words = tokens(length)
            words[1, length // 2 :], words[3, -2:] = 0, 0
            made.append((words, torch.arange(4) % 3))
        return made


class Remembers(Model):
    """A convolution, a recurrence and a running sum along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.convolved = nn.Embedding(WORDS, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3)
        self.memory, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WORDS)

    def loss(self, batch: Any) -> Tensor:
        h = self.words(batch[0])
        h = h + self.convolved(F.pad(h.transpose(1, 2), (2, 0))).transpose(1, 2)
        h, _ = self.memory(h)
        h = h + h.cumsum(1) * 0.01
        return F.cross_entropy(self.head(h[:, :-1]).reshape(-1, WORDS), batch[0][:, 1:].reshape(-1))

    @staticmethod
    def batches() -> list[Any]:
        return [[tokens(length)] for length in (9, 12, 4)]


class Forecasts(Model):
    """Numbers in place of tokens, statistics over samples and positions, a learned bias for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.norm = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3), nn.BatchNorm1d(WIDTH)
        self.distances = nn.Embedding(40, 2)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)

    def loss(self, batch: Any) -> Tensor:
        given, wanted = batch
        h = self.norm(self.into(given).transpose(1, 2)).transpose(1, 2)
        places = torch.arange(h.shape[1])
        bias = self.distances((places[:, None] - places).clamp(min=0)).permute(2, 0, 1).repeat(len(h), 1, 1)
        made = self.out(self.layer(h, src_mask=bias))
        return F.mse_loss(made, wanted) + 0.1 * F.smooth_l1_loss(made[:, 1:], wanted[:, :-1])

    @staticmethod
    def batches() -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        return [(draw(4, length, 3), draw(4, length, 3)) for length in (8, 11, 8)]


class Attends(nn.Module):
    """Attention written by hand, with a mask of the user's own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) / (d // self.heads) ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))


class Written(Model):
    """What a user writes and does: documents in the batch, metrics, lists of outputs, a look at them on rank 0."""

    def __init__(self, length: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(17, 16), nn.Parameter(torch.randn(length, 16) / 4)
        self.layers, self.head = nn.ModuleList(Attends(16, 2) for _ in range(2)), nn.Linear(16, 17)
        self.scale, self.accuracy = nn.Parameter(torch.ones(16)), MulticlassAccuracy(17, average="micro")
        self.everything, self.kept, self.looked, self.seen = CatMetric(), [], [], None

    def forward(self, words: Tensor, documents: Tensor) -> Tensor:
        length = words.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None])
        x = self.words(words) + self.places[:length] * self.scale
        for layer in self.layers:
            x = layer(x, mask[:, None])
        return self.head(x)

    def parts(self, batch: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
        logits, labels = self(batch["tokens"], batch["documents"])[:, :-1], batch["tokens"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)
        spread = logits.logsumexp(-1).square().mean()
        self.log_dict({f"{name}_loss": loss, f"{name}_spread": spread}, on_epoch=True)
        self.log(f"{name}_samples", float(len(labels)), reduce_fx="sum", on_step=False, on_epoch=True, batch_size=1)
        return loss + 1e-3 * spread, logits

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss, self.seen = self.parts(batch, "train")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:  # nobody else comes here
            self.looked.append(self.seen.std().item())

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        _, logits = self.parts(batch, "val")
        best = logits.argmax(-1)
        self.accuracy(best, batch["tokens"][:, 1:])
        self.everything.update(logits.amax(-1).flatten())
        self.log("val_accuracy", self.accuracy)
        self.kept.append({"best": best, "sure": [logits.softmax(-1).amax(-1)]})

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.looked.append(torch.cat([each["sure"][0].flatten() for each in self.kept]).numpy().sum().item())
        self.log("val_everything", self.everything.compute().sum())
        self.everything.reset()
        self.kept.clear()

    def predict_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self(batch["tokens"], batch["documents"]).argmax(-1)

    @staticmethod
    def batches() -> list[dict[str, Tensor]]:
        made = []
        for length in (12, 12, 9, 2, 3, 11):
            ids = (torch.arange(length) > length // 3)[None].repeat(2, 1).long()
            made.append({"tokens": tokens(length, 2) % 17, "documents": ids})
        return made


class StepsByHand(Classifies):
    """Optimizes manually: two batches a step, a mask of weights over tokens."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, loss = self.optimizers(), self.loss(batch)
        self.manual_backward(loss)
        self.log("train_loss", loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.3, "norm")
            optimizer.step()
            optimizer.zero_grad()


def trained(model: Callable[[], Any], make_strategy: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics, what a module looked at on rank 0 and what it predicts among them, and weights."""
    warnings.simplefilter("ignore")  # what torch's layers say of masks, and Lightning of single devices
    if make_strategy is None:
        leave_group()
    torch.manual_seed(0)
    module = model().double()
    data = DataLoader(model.batches(), batch_size=None)
    automatic = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2} if module.automatic_optimization else {}
    run = trainer(make_strategy() if make_strategy else "auto", max_epochs=2, **automatic)
    torch.backends.mha.set_fastpath_enabled(False)  # in evaluation it has other values where something is masked
    try:
        run.fit(module, data, data)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    if isinstance(module, Written):
        metrics |= {f"looked {number}": value for number, value in enumerate(module.looked)}
        predicted = trainer(make_strategy() if make_strategy else "auto").predict(module, data)
        metrics |= {f"predicted {number}": float(each.double().norm()) for number, each in enumerate(predicted)}
    return metrics, dict(module.state_dict())


LAYOUTS = {
    "ring": (2, partial(ContextParallelStrategy, 2, method="ring")),
    "ulysses": (2, partial(ContextParallelStrategy, 2, method="ulysses")),
    "zero 3 over": (2, partial(HybridStrategy, ContextParallel(2), Zero(1))),
    "four ranks": (4, partial(ContextParallelStrategy, 4)),
    "tensor": (4, partial(HybridStrategy, ContextParallel(2), TensorParallel(2))),
}
ROWS = [
    *((Written, "zero 3 over"), (Remembers, "four ranks"), (Classifies, "ulysses"), (Forecasts, "tensor")),
    *((StepsByHand, "ring"), (Forecasts, "ulysses"), (Classifies, "tensor"), (Written, "four ranks")),
]


def require_same(found: list[Any], expected: Any) -> None:
    for rank, (metrics, weights) in enumerate(found):
        wanted = {name: value for name, value in expected[0].items() if rank == 0 or not name.startswith("looked")}
        require_like(wanted, metrics, 1e-10, 1e-10)
        require_like(expected[1], weights, 1e-9, 1e-11)


@sampled(1, ("model", "layout"), ROWS)
def test_model_trains_as_on_one_device(model: type[Model], layout: str) -> None:
    begun, (count, strategy) = begun_on_one(trained, model, None), LAYOUTS[layout]
    require_same(run_on_ranks(count, trained, model, strategy), begun.result())


class TimeFirst(Model):
    """Sequences run along the first dimension; it tells how many positions this rank's logits have."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.own = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), set[int]()

    def loss(self, batch: Any) -> Tensor:
        heads = self.words(batch["words"]).unflatten(2, (2, -1)).permute(1, 2, 0, 3)
        h = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        logits = self.head(h)
        self.own.add(getattr(logits, "own", logits).shape[0])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    @staticmethod
    def batches() -> list[Any]:
        made = [tokens(length).T for length in (12, 9)]
        return [{"words": words, "labels": words.roll(-1, 0)} for words in made]

    def on_fit_end(self) -> None:
        self.trainer.callback_metrics["own"] = torch.tensor(float(sum(self.own)))


TIME_FIRST = partial(ContextParallelStrategy, 2, plan=ParallelPlan(sequence_dim=0))


def test_sequences_along_another_dimension() -> None:
    begun = begun_on_one(trained, TimeFirst, None)
    found, expected = run_on_ranks(2, trained, TimeFirst, TIME_FIRST), begun.result()
    own = expected[0].pop("own")
    assert max(metrics.pop("own") for metrics, _ in found) < 0.6 * own
    require_same(found, expected)


# ---------------------------------------------------------------- batches that are objects, and what is refused


class Padded:
    """A batch of a class of its own, with the tokens of its samples."""

    def __init__(self, words: Tensor, names: Any = None) -> None:
        self.words, self.names = words, names


class Slotted:
    """A batch without a `__dict__`."""

    __slots__ = ("inside",)

    def __init__(self, words: Tensor) -> None:
        self.inside = {"padded": Padded(words)}


@dataclass
class Columns:
    """A batch into which everybody looks."""

    words: Tensor
    names: Any = None


class OwnBatches(TimeFirst):
    def loss(self, batch: Any) -> Tensor:
        first = batch[0] if isinstance(batch, list) else batch
        words = first if isinstance(first, Tensor) else getattr(first, "words", None)
        return super().loss({"words": words, "labels": words})


OBJECTS: list[tuple[Callable[[Tensor], Any], str]] = [
    (Padded, r"shape \(12, 4\) is an attribute of a Padded, .*make Padded a dataclass, or let collate_fn"),
    (Slotted, r"shape \(12, 4\) is an attribute of a Padded"),
    (lambda words: [words, Padded(words)], "is an attribute of a Padded"),
    (Columns, ""),
    (lambda words: [words, Padded(None, ["a", "b"])], ""),  # type: ignore[arg-type]
    (lambda words: [words, Padded(torch.ones(4, 3))], ""),
]


class CompilesItself(Classifies):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.compile(self.head)


class Flat(Model):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(5, 3)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.map(batch[0]), batch[1])

    @staticmethod
    def batches() -> list[Any]:
        return [(torch.ones(4, 5).double(), torch.arange(4) % 3)]


REFUSED: list[tuple[Any, Any, str]] = [
    (Flat, LAYOUTS["ring"][1], r"divides sequences, .*\[\(4, 5\), \(4,\)\].*DataParallelStrategy"),
    (Remembers, partial(ContextParallelStrategy, 2, method="rings"), "method is one of 'auto', 'ring', 'ulysses'"),
    (Remembers, partial(HybridStrategy, ContextParallel(2), ContextParallel(1)), "both claim the axis cp"),
    (Classifies, partial(ContextParallelStrategy, 3), "3 ranks"),
    (CompilesItself, LAYOUTS["ring"][1], r"head is compiled by torch.compile.*HybridStrategy\(\.\.\., Compile"),
]


@ranks(2)
def test_what_cannot_be_divided_is_refused_with_a_remedy() -> None:
    for made, said in OBJECTS:
        model: Any = type("Own", (OwnBatches,), {"batches": staticmethod(lambda made=made: [made(tokens(12).T)])})
        if not said:
            assert trained(model, TIME_FIRST)[0]["own"] == 6
            continue
        with pytest.raises(ValueError, match=said):
            trained(model, TIME_FIRST)
    for model, strategy, said in REFUSED:
        with pytest.raises(ValueError, match=f"(?s){said}"):
            trained(model, strategy)
