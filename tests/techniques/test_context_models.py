"""Context parallel on models that users write: attention, recurrences, losses and statistics of their own."""

from __future__ import annotations

import re
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

from lightning_parallel import (
    ContextParallel,
    ContextParallelStrategy,
    HybridStrategy,
    ParallelPlan,
    TensorParallel,
    Zero,
)
from tests.rank_process import leave_group
from tests.ranks import begun_on_one, run_on_ranks
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


class Translates(Model):
    """Torch's encoder and decoder: two sequences of other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.network = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def loss(self, batch: Any) -> Tensor:
        given, wanted = batch["target"][:, :-1], batch["target"][:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1]).to(self.head.weight.dtype)
        h = self.network(self.words(batch["source"]), self.words(given), tgt_mask=mask)
        return F.cross_entropy(self.head(h).transpose(1, 2), wanted, label_smoothing=0.1)

    @staticmethod
    def batches() -> list[Any]:
        return [{"source": tokens(s), "target": tokens(t)} for s, t in ((10, 7), (8, 8), (5, 11))]


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


class Weighs(Model):
    """Attention by einsum with slopes, a tied head, entropies, a variance over positions, accuracy by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.sharpness = (
            nn.Embedding(WORDS, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Parameter(torch.zeros(1)),
        )
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]))

    def loss(self, batch: Any) -> Tensor:
        words = batch["words"]
        (b, t), h = words.shape, self.words(words)
        places = torch.arange(t)
        q, k, v = self.qkv(self.norm(h)).view(b, t, 3, 2, 8).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
        scores = scores - self.slopes.view(1, 2, 1, 1) * (places[:, None] - places).abs()
        weights = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -1e9).softmax(-1)
        h = h + self.out(torch.einsum("bhij,bjhd->bihd", weights, v).reshape(b, t, WIDTH)) * self.sharpness.exp()
        logits = h @ self.words.weight.T
        logs = logits.log_softmax(-1)
        picked = logs[:, :-1].gather(-1, words[:, 1:, None]).squeeze(-1)
        self.log("accuracy", (logits.argmax(-1)[:, :-1] == words[:, 1:]).double().mean())
        spread = logits.logsumexp(-1).pow(2).mean() * 1e-3 + h.var(1).mean() * 1e-2
        return -picked.mean() + (logs.exp() * logs).sum(-1).mean() * 1e-2 + spread

    @staticmethod
    def batches() -> list[Any]:
        return [{"words": tokens(length)} for length in (9, 12, 3, 16)]


class Chooses(Model):
    """The best positions, masks over positions, numbers of different words, largest values."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.score, self.map = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def loss(self, batch: Any) -> Tensor:
        words = batch["words"]
        h = self.words(words)
        weight, place = self.score(h).squeeze(-1).topk(3, dim=1)
        places = place[..., None].expand(-1, -1, WIDTH)
        h = h.scatter_add(1, places, F.relu(self.map(h.gather(1, places))) * weight.sigmoid()[..., None])
        kept = words > 3
        loss = F.cross_entropy(self.head(h)[kept], words[kept])
        return loss * (1 + 0.01 * torch.unique(words).numel()) + (h.norm() + h.flatten(1).max()) * 1e-3

    batches = Weighs.batches


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
    return {name: float(value) for name, value in run.callback_metrics.items()}, dict(module.state_dict())


LAYOUTS = {
    "ring": (2, partial(ContextParallelStrategy, 2, method="ring")),
    "ulysses": (2, partial(ContextParallelStrategy, 2, method="ulysses")),
    "zero3 over cp": (2, partial(HybridStrategy, ContextParallel(2), Zero(1))),
    "four ranks": (4, partial(ContextParallelStrategy, 4)),
}
MODELS = (Classifies, Translates, Remembers, Forecasts, Weighs, Chooses, StepsByHand)


@sampled(1, ("model", "layout"), [(model, layout) for layout in LAYOUTS for model in MODELS])
def test_a_model_trains_as_on_one_device(model: type[Model], layout: str) -> None:
    begun = begun_on_one(trained, model, None)
    for metrics, found in run_on_ranks(LAYOUTS[layout][0], trained, model, LAYOUTS[layout][1]):
        expected, weights = begun.result()
        assert metrics == pytest.approx(expected, rel=1e-10)
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-11)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [Classifies, pytest.param(Translates, marks=pytest.mark.exhaustive)])
def test_beside_tensor_parallel(model: type[Model]) -> None:
    begun = begun_on_one(trained, model, None)
    both = partial(HybridStrategy, ContextParallel(2), TensorParallel(2))
    for metrics, found in run_on_ranks(4, trained, model, both):
        expected, weights = begun.result()
        assert metrics == pytest.approx(expected, rel=1e-10)
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-11)


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


def test_sequences_along_another_dimension() -> None:
    expected, weights = begun_on_one(trained, TimeFirst, None).result()
    plan = ParallelPlan(sequence_dim=0)
    for metrics, found in run_on_ranks(2, trained, TimeFirst, partial(ContextParallelStrategy, 2, plan=plan)):
        assert metrics.pop("own") < 0.6 * expected["own"]
        assert metrics == pytest.approx({name: expected[name] for name in metrics}, rel=1e-10)
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------- batches that are objects


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
    """Tells how many positions this rank's logits have; the batch is of some class, or beside an object of it."""

    def loss(self, batch: Any) -> Tensor:
        first = batch[0] if isinstance(batch, list) else batch
        words = first if isinstance(first, Tensor) else getattr(first, "words", None)
        return super().loss({"words": words, "labels": words})


BESIDE = {
    "an object": (Padded, r"shape \(12, 4\) is an attribute of a Padded, .*make Padded a dataclass, or let collate_fn"),
    "slots, and an object in an object": (Slotted, r"shape \(12, 4\) is an attribute of a Padded"),
    "tokens beside an object with them": (lambda words: [words, Padded(words)], "is an attribute of a Padded"),
    "a dataclass": (Columns, None),
    "an object without tensors": (lambda words: [words, Padded(None, ["a", "b"])], None),
    "an object with other tensors": (lambda words: [words, Padded(torch.ones(4, 3))], None),
}


def own_batches(made: Callable[[Tensor], Any], said: str | None) -> None:
    model: Any = type("Own", (OwnBatches,), {"batches": staticmethod(lambda: [made(tokens(12).T)])})
    strategy = partial(ContextParallelStrategy, 2, plan=ParallelPlan(sequence_dim=0))
    if said is None:
        assert trained(model, strategy)[0]["own"] == 6
        return
    with pytest.raises(ValueError, match=said):
        trained(model, strategy)


@pytest.mark.parametrize("batch", BESIDE)
def test_batches_of_own_classes_are_divided_or_refused(batch: str) -> None:
    run_on_ranks(2, own_batches, *BESIDE[batch])


# ---------------------------------------------------------------- refused


class Attends(Model):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 12), nn.Linear(12, WORDS)

    def loss(self, batch: Any) -> Tensor:
        heads = self.words(batch["words"]).unflatten(2, (3, 4)).transpose(1, 2)
        h = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(h).flatten(0, 1), batch["words"].flatten())

    batches = Weighs.batches


class CompilesItself(Attends):
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


def refusal(model: Any, make_strategy: Any) -> str:
    try:
        trained(model, make_strategy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@sampled(
    3,
    ("model", "strategy", "said"),
    [
        (Flat, LAYOUTS["ring"][1], r"divides sequences, .*\[\(4, 5\), \(4,\)\].*DataParallelStrategy"),
        (Weighs, partial(ContextParallelStrategy, 2, method="rings"), "method is one of 'auto', 'ring', 'ulysses'"),
        (Weighs, partial(HybridStrategy, ContextParallel(2), ContextParallel(1)), "both claim the axis cp"),
        (Classifies, partial(ContextParallelStrategy, 3), "3 ranks"),
        (CompilesItself, LAYOUTS["ring"][1], r"head is compiled by torch.compile.*HybridStrategy\(\.\.\., Compile"),
        (Attends, partial(ContextParallelStrategy, 2, method="ulysses"), "3 of queries.*use 1 or 3 ranks.*ring"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_a_remedy(model: Any, strategy: Any, said: str) -> None:
    for found in run_on_ranks(2, refusal, model, strategy):
        assert found.startswith("ValueError"), found
        assert re.search(said, found, re.DOTALL), found
