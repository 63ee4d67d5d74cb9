"""Samples that meet each other, and means that are no parts of a sum: ranks that read different samples are told."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import (
    DataParallel,
    DataParallelStrategy,
    HybridStrategy,
    TensorParallel,
    TensorParallelStrategy,
    ZeroStrategy,
)
from lightning_parallel.techniques.tools.means import Means
from lightning_parallel.techniques.tools.meeting import meeting_of, uses_of
from tests.models import Optimized
from tests.ranks import begun_on_one, run_on_ranks
from tests.techniques.tensor_layouts import hybrid
from tests.tiers import sampled
from tests.trainers import trainer

B = 8
LABELS = torch.arange(B)
Loss = Callable[["Layers"], Tensor]


class Layers:
    """Layers of all kinds that are as wide as the batch, and embeddings of its samples."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mlp = nn.Sequential(nn.Linear(5, B), nn.Tanh(), nn.Linear(B, B), nn.Tanh(), nn.Linear(B, B))
        self.wide, self.frozen, self.embedding = nn.Linear(16, 16), nn.Linear(B, B), nn.Embedding(B, B)
        self.frozen.requires_grad_(False)
        self.encoder = nn.Linear(5, 6)
        self.low = nn.Parameter(torch.randn(B, 2)), nn.Parameter(torch.randn(2, B))
        self.x, self.words, self.tokens = torch.randn(B, 5), torch.randn(B, B, 16), torch.randint(B, (B, B))

    def z(self) -> Tensor:
        return F.normalize(self.encoder(torch.randn(B, 5)), dim=-1)

    def h(self) -> Tensor:
        return self.mlp(self.x)


def simclr(m: Layers) -> Tensor:
    z = torch.cat([m.z(), m.z()])
    scores = (z @ z.T).masked_fill(torch.eye(2 * B).bool(), -1e9)
    return F.cross_entropy(scores, (torch.arange(2 * B) + B) % (2 * B))


CONTRASTIVE: dict[str, Loss] = {
    "clip": lambda m: F.cross_entropy(m.z() @ m.z().T * nn.Parameter(torch.ones(())).exp(), LABELS),
    "simclr": simclr,
    "one side fixed": lambda m: F.cross_entropy(m.z() @ m.z().detach().T, LABELS),
    "einsum": lambda m: torch.einsum("id,jd->ij", m.z(), m.z()).logsumexp(1).mean(),
    "distances": lambda m: torch.cdist(m.z(), m.z()).mean(),
    "differences": lambda m: (m.z()[:, None] - m.z()[None]).square().sum(-1).mean(),
    "cosines": lambda m: F.cosine_similarity(m.z()[:, None], m.z()[None], dim=-1).mean(),
    "correlation": lambda m: (m.z().T @ m.z() / B - torch.eye(6)).square().sum(),
}


def attention(m: Layers) -> Tensor:
    h = m.wide(m.words)
    return ((h @ h.transpose(1, 2)).softmax(-1) @ h).mean()


def gathered(m: Layers) -> Tensor:
    a, b = (torch.cat([m.z(), m.z().detach()]) for _ in range(2))  # what other ranks have is without gradients
    return F.cross_entropy(a @ b.T, torch.arange(2 * B))


def tied(m: Layers) -> Tensor:
    return F.cross_entropy(F.linear(m.embedding(m.tokens), m.embedding.weight).flatten(0, 1), m.tokens.flatten())


APART: dict[str, Loss] = {
    "as wide as the batch": lambda m: F.cross_entropy(m.h(), LABELS),
    "as long as the batch": attention,
    "torch's attention": lambda m: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)(m.words).mean(),
    "tied": tied,
    "low rank": lambda m: F.linear(m.h(), m.low[0] @ m.low[1]).mean(),
    "norms of weights": lambda m: spectral_norm(nn.Linear(B, B))(weight_norm(nn.Linear(B, B))(m.h())).mean(),
    "frozen": lambda m: m.mlp[2:](m.frozen(m.h())).mean(),
    "gathered": gathered,
}


@pytest.mark.parametrize("loss", CONTRASTIVE)
def test_samples_that_are_compared_meet(loss: str) -> None:
    assert meeting_of(CONTRASTIVE[loss](Layers()), B) is not None


@pytest.mark.parametrize("loss", APART)
def test_samples_that_do_not_meet_or_have_been_gathered_are_no_alarm(loss: str) -> None:
    assert meeting_of(APART[loss](Layers()), B) is None


# -------------------------------------------------------------------- uses of means


def balance(m: Layers) -> Tensor:
    p = m.wide(m.words).flatten(0, 1).softmax(-1)
    share = F.one_hot(p.argmax(-1), 16).float().mean(0)
    return F.cross_entropy(m.h(), LABELS) + 0.01 * 16 * (share * p.mean(0)).sum()


def entropy(m: Layers) -> Tensor:
    p = m.wide(m.words).flatten(0, 1).softmax(-1).mean(0)
    return (p * p.log()).sum()


NO_SUMS: dict[str, Loss] = {
    "exp": lambda m: F.cross_entropy(m.h(), LABELS).exp(),
    "root": lambda m: F.mse_loss(m.h(), torch.zeros(B, B)).sqrt(),
    "product": lambda m: F.cross_entropy(m.h(), LABELS) * F.mse_loss(m.h(), torch.zeros(B, B)),
    "balance of a router": balance,
    "entropy of a mean": entropy,
    "loss of means": lambda m: F.mse_loss(m.encoder(m.x).mean(0), torch.ones(6)),
    "distance of means": lambda m: F.l1_loss(m.encoder(m.x).mean(0) - 1, 2 * m.wide(m.words).mean((0, 1))[:6]),
    "spread": lambda m: F.cross_entropy(m.h(), LABELS) + m.encoder(m.x).var(0).mean(),
    "hinge on a spread": lambda m: F.relu(1 - m.encoder(m.x).std(0)).mean(),
    "norm": lambda m: m.h().norm(),
    "sum of exponentials": lambda m: m.h().sum(1).logsumexp(0),
    "largest": lambda m: m.h().amax(),
}
SUMS: dict[str, Loss] = {
    "weight decay": lambda m: F.cross_entropy(m.h(), LABELS) + sum(p.square().sum() for p in m.mlp.parameters()),
    "lasso": lambda m: F.cross_entropy(m.h(), LABELS) + m.mlp[2].weight.square().sum(0).sqrt().sum(),
    "by hand": lambda m: (m.h() - m.x.sum(1, keepdim=True)).square().mean(),
    "z-loss": lambda m: m.wide(m.words).logsumexp(-1).square().mean(),
    "divergence": lambda m: (m.h().exp() - m.h().square()).sum(1).mean() * 0.5,
    "norms of samples": lambda m: m.h().norm(dim=-1).mean() + m.h().var(1).mean() + m.h().amax(-1).mean(),
    "norms of weights": lambda m: (
        F.cross_entropy(m.h(), LABELS) + m.mlp[2].weight.norm() + m.mlp[2].weight.amax(0).sum()
    ),
    "losses of samples": lambda m: F.mse_loss(m.h().mean(1), m.x.mean(1)) + F.l1_loss(m.h() / 2, m.h()),
    "pooled": lambda m: (m.wide(m.words).mean(1) - 1).square().mean(),
}


def uses(loss: Loss) -> Any:
    with Means() as means:
        value = loss(Layers())
    return uses_of(value, [mean.edge for mean in means.all], B)


@pytest.mark.parametrize("loss", NO_SUMS)
def test_a_loss_that_is_no_sum_of_means_is_seen(loss: str) -> None:
    assert uses(NO_SUMS[loss]).bent is not None


@pytest.mark.parametrize("loss", SUMS)
def test_sums_of_means_and_of_penalties_on_weights_are_no_alarm(loss: str) -> None:
    assert uses(SUMS[loss]) == (None, [])


def test_a_weight_that_is_learned_is_no_alarm_by_itself() -> None:
    learned = nn.Parameter(torch.zeros(()))
    assert uses(lambda m: F.cross_entropy(m.h(), LABELS) * learned.neg().exp() + learned) == (None, [0])


# -------------------------------------------------------------------- runs


class Losses(LightningModule):
    """A step that compares samples, or whose loss is no sum; by hand or not."""

    def __init__(self, kind: str, manual: bool = False) -> None:
        super().__init__()
        self.kind, self.automatic_optimization = kind, not manual
        self.layer, self.learned = nn.Linear(4, 4), nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.loss(*batch)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        return None

    def loss(self, x: Tensor) -> Tensor:
        z = F.normalize(self.layer(x), dim=-1)
        if self.kind == "apart":
            return F.cross_entropy(z, torch.arange(len(x)))
        if self.kind in ("exp", "learned"):
            targets = torch.arange(len(x)).masked_fill(x[:, 0] == 0, -100)
            ce = F.cross_entropy(z, targets)
            return ce.exp() if self.kind == "exp" else ce * self.learned.exp()
        others = self.all_gather(z, sync_grads=True).flatten(0, 1) if self.kind == "gathered" else z
        return F.cross_entropy(others @ others.T, torch.arange(len(others)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(strategy: Any, *runs: tuple[str, bool]) -> list[list[str]]:
    x = torch.ones(16, 4)
    x[0, 0] = 0.0
    logger, all_told = logging.getLogger("lightning_parallel"), []
    for kind, manual in runs:
        told = Told()
        logger.addHandler(told)
        logger.setLevel(logging.INFO)
        trainer(strategy(), max_epochs=2).fit(Losses(kind, manual), DataLoader(TensorDataset(x), 4))
        logger.removeHandler(told)
        all_told.append([line for line in told.lines if "meet each other" in line or "no sum of means" in line])
    return all_told


KINDS = [("pairs", False), ("pairs", True), ("apart", False), ("gathered", False), ("exp", False), ("learned", False)]


@sampled(1, "strategy", [DataParallelStrategy, partial(ZeroStrategy, stage=2)])
def test_ranks_that_read_different_samples_are_told_once(strategy: Any) -> None:
    first, second = run_on_ranks(2, train, strategy, *KINDS)
    assert [len(lines) for lines in first] == [1, 1, 0, 0, 1, 1]
    assert "Mm makes a tensor of shape (4, 4) of 4 samples" in first[0][0]
    assert "self.all_gather(z, sync_grads=True)" in first[1][0]
    assert "Exp of a mean" in first[4][0]
    assert "learned" in first[5][0]
    assert not any(second)


class Contrastive(Optimized):
    """Samples that meet those of all ranks, which compute a model of which each has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.make_optimizer = partial(torch.optim.SGD, lr=0.5)
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = x + layer(x)
        z = F.normalize(self.all_gather(x, sync_grads=True).flatten(0, 1), dim=-1)
        return F.cross_entropy(z @ z.T * 5, torch.arange(len(z)).roll(1))


def trained_on(strategy: Any, batch: int) -> list[Tensor]:
    torch.manual_seed(0)
    module, x = Contrastive(), torch.randn(16, 4)
    trainer(strategy(), max_epochs=2).fit(module, DataLoader(TensorDataset(x), batch))
    return [parameter.detach().clone() for parameter in module.parameters()]


@sampled(
    1,
    ("n", "strategy", "readers"),
    [(2, partial(TensorParallelStrategy, 2), 1), (4, hybrid(DataParallel(2), TensorParallel(2)), 2)],
    ids=["tp2", "dp2 x tp2"],
)
def test_samples_meet_across_ranks_that_divide_a_model(n: int, strategy: Any, readers: int) -> None:
    """In backward too, where the ranks that read other samples are not the first ones of the world."""
    expected = begun_on_one(trained_on, HybridStrategy, 8)
    for found in run_on_ranks(n, trained_on, strategy, 8 // readers):
        torch.testing.assert_close(found, expected.result())
