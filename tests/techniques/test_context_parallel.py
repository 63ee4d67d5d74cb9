"""Context parallel trains as one process does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_parallel import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    ContextParallelStrategy,
    DataParallel,
    PipelineParallel,
    TensorParallel,
    Zero,
)
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.context_parallel.attention import ContextAttention
from lightning_parallel.techniques.context_parallel.technique import Sequences
from tests.heard import heard
from tests.models import build
from tests.rank_process import leave_group
from tests.ranks import begun_on_one, ranks, run_on_ranks
from tests.techniques.tensor_layouts import check, hybrid
from tests.tiers import covering, sampled
from tests.trainers import trainer

CP2 = partial(ContextParallelStrategy, 2)
METHODS = {
    "cp2": (2, CP2, 1),
    "cp4": (4, partial(ContextParallelStrategy, 4, method="ring"), 1),
    "cp2 ulysses": (2, partial(ContextParallelStrategy, 2, method="ulysses"), 1),
    "cp2 all_gather": (2, partial(ContextParallelStrategy, 2, method="all_gather"), 1),
    "cp4 hybrid": (4, partial(ContextParallelStrategy, 4, method="hybrid", ulysses_size=2), 1),
    "cp2 in order": (2, partial(ContextParallelStrategy, 2, load_balance=False), 1),
}
BESIDE = {
    "dp2 x cp2": (4, hybrid(DataParallel(2), ContextParallel(2)), 2),
    "zero2 x cp2": (4, hybrid(Zero(2, stage=2), ContextParallel(2)), 2),
    "zero3 over cp2": (2, hybrid(Zero(1), ContextParallel(2)), 1),
    "zero3 x cp2": (4, hybrid(Zero(2), ContextParallel(2)), 2),
    "pp2 x cp2": (4, hybrid(PipelineParallel(2, microbatches=2), ContextParallel(2)), 1),
    "cp2 x tp2": (4, hybrid(ContextParallel(2), TensorParallel(2)), 1),
    "pp2 x cp2 x tp2": (8, hybrid(PipelineParallel(2), ContextParallel(2), TensorParallel(2)), 1),
    "cp2 recomputed": (2, hybrid(ContextParallel(2), ActivationCheckpoint()), 1),
    "cp2 compiled": (2, hybrid(ContextParallel(2), Compile(backend="aot_eager")), 1),
}
COLUMNS = ("gpt", "llama", "gpt2", "qwen3", "phi3", "mistral")
SHORT: dict[str, Any] = {"max_epochs": 1, "data": {"samples": 24, "val_samples": 8, "length": 19, "ignored": 0.3}}


@covering(keep=1, layout=METHODS, column=COLUMNS)
def test_a_method_trains_as_one_process_does(layout: str, column: str) -> None:
    exact = column in ("gpt", "llama")  # the other losses are computed in single precision, whatever comes in
    check(column, *METHODS[layout], **SHORT, precision="64-true", rtol=1e-9 if exact else 1e-6)


@covering(keep=1, first=0, layout=BESIDE, column=("gpt", "llama"))
def test_beside_other_techniques(layout: str, column: str) -> None:
    check(column, *BESIDE[layout], **SHORT)


class Sends(nn.Module):
    """A block whose attention sends messages, and whose feed-forward sends none."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.feed = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.feed(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


class Sending(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(17, 8), nn.ModuleList(Sends() for _ in range(2))

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.words(batch["tokens"])
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@ranks(2)
def test_blocks_that_send_messages_run_as_they_are_and_their_parts_are_compiled() -> None:
    warnings.simplefilter("ignore")  # the compiler itself raises some of them
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with heard() as said:
        run = trainer(BESIDE["cp2 compiled"][1](), max_epochs=1)
        run.fit(Sending(), DataLoader(batches([12]), batch_size=None))
    told = [line for line in said if "attention over a divided sequence" in line]
    assert bool(told) == (run.global_rank == 0), said
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1  # the feed-forward's


@sampled(1, "layout", [*METHODS, "pp2 x cp2"])
def test_packed_documents_do_not_see_each_other(layout: str) -> None:
    data = SHORT["data"] | {"documents": True}
    check("gpt", *(METHODS | BESIDE)[layout], max_epochs=1, data=data, precision="64-true", rtol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["cp2", "cp2 ulysses", "cp2 all_gather"])
def test_a_long_sequence_in_single_precision(layout: str) -> None:
    data = {"samples": 4, "val_samples": 2, "length": 4096}
    model = {"n_layers": 2, "context": 4096, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    check("gpt", *METHODS[layout], max_epochs=1, global_batch=2, data=data, model=model, rtol=1e-5)


def saved(run: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes of what backward needs, but for parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()  # held: what is freed could be found again at the same place
    del loss
    return sum(found.values())


@sampled(1, "n", [2, 4])
def test_activations_are_divided_by_the_ranks_logits_and_loss_too(n: int) -> None:
    for column in ("gpt", "llama"):
        run_on_ranks(n, require_activations, column, 512)


def require_activations(column: str, length: int) -> None:
    model = build(column, **({"context": length} if column == "gpt" else {"max_position_embeddings": length}))
    model.configure_model()
    loss = model._loss if column == "gpt" else model.loss
    batch = {name: torch.arange(2 * length).view(2, length) % 7 for name in ("input_ids", "labels")}
    among = Ranks(dist.group.WORLD, "cp", averages=lambda _: True)
    among.attention = ContextAttention("ring")
    divided = Sequences(among, 1, balanced=True, asker="").divided(batch)
    alone = saved(lambda: loss(batch), model.parameters())
    assert saved(lambda: loss(divided), model.parameters()) == pytest.approx(alone / among.count, rel=0.03)
    assert not among.gathered


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


class Written(LightningModule):
    """What a user writes and does: documents in the batch, metrics, lists of outputs, a look at them on rank 0."""

    def __init__(self, length: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(17, 16), nn.Parameter(torch.randn(length, 16) / 4)
        self.layers, self.head = nn.ModuleList(Attends(16, 2) for _ in range(2)), nn.Linear(16, 17)
        self.scale, self.accuracy = nn.Parameter(torch.ones(16)), MulticlassAccuracy(17, average="micro")
        self.everything, self.kept, self.looked, self.seen = CatMetric(), [], [], None

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None])
        x = self.words(tokens) + self.places[:length] * self.scale
        for layer in self.layers:
            x = layer(x, mask[:, None])
        return self.head(x)

    def loss(self, batch: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
        logits, labels = self(batch["tokens"], batch["documents"])[:, :-1], batch["tokens"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)
        spread = logits.logsumexp(-1).square().mean()
        self.log_dict({f"{name}_loss": loss, f"{name}_spread": spread}, on_epoch=True)
        self.log(f"{name}_samples", float(len(labels)), reduce_fx="sum", on_step=False, on_epoch=True, batch_size=1)
        return loss + 1e-3 * spread, logits

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss, self.seen = self.loss(batch, "train")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0:  # nobody else comes here
            self.looked.append(self.seen.std().item())

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        _, logits = self.loss(batch, "val")
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

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in lengths:
        tokens = torch.randint(17, (2, length), generator=generator)
        made.append({"tokens": tokens, "documents": (torch.arange(length) > length // 3)[None].repeat(2, 1).long()})
    return made


def ways(make_strategy: Any) -> tuple[dict[str, float], list[float], list[Tensor], dict[str, Tensor]]:
    if make_strategy is None:
        leave_group()
    model = Written().double()
    data = DataLoader(batches([12, 12, 9, 2, 3, 11]), batch_size=None)
    run = trainer(make_strategy() if make_strategy else "auto", max_epochs=2, gradient_clip_val=0.5)
    run.fit(model, data, data)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    predicted = trainer(make_strategy() if make_strategy else "auto").predict(model, data)
    return metrics, model.looked, predicted, {name: p.detach() for name, p in model.named_parameters()}


@sampled(
    1,
    ("n", "strategy"),
    [
        (2, CP2),
        (4, hybrid(ContextParallel(4, load_balance=False))),
        (2, hybrid(Zero(1), ContextParallel(2, method="ulysses"))),
        (2, hybrid(ContextParallel(2, method="all_gather"))),
    ],
)
def test_what_users_do_is_that_of_one_device(n: int, strategy: Any) -> None:
    begun = begun_on_one(ways, None)
    for rank, found in enumerate(run_on_ranks(n, ways, strategy)):
        expected = begun.result()
        assert found[0] == pytest.approx(expected[0], rel=1e-10)
        assert found[1] == (pytest.approx(expected[1], rel=1e-10) if rank == 0 else [])
        assert all(map(torch.equal, found[2], expected[2]))
        torch.testing.assert_close(found[3], expected[3], rtol=1e-10, atol=1e-12)
