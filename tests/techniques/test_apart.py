"""Whether samples of a batch meet each other, found in one process without values, or told that it could not be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.techniques.division import Sample
from lightning_parallel.techniques.observed.samples.apart import meetings
from lightning_parallel.techniques.tools.means import Means
from tests.techniques.test_observed import HOST, SAMPLES, WIDTH, Model, OwnError, breaks_off, plain


def check_apart(step: Callable[..., Any], parts: int = 4, complete: bool = True) -> None:
    model = Model()
    require_apart(model, Sample(lambda batch: step(model, batch), torch.randn(SAMPLES, WIDTH), HOST), parts, complete)


def require_apart(model: Model, sample: Sample, parts: int, complete: bool) -> None:
    for meeting in meetings(model, sample, parts, complete, model.blocks[-1]):
        assert not meeting.in_blocks
        meeting.refuse()


def contrastive(model: Model, x: Tensor) -> Tensor:
    y = model.body(x)
    return F.cross_entropy(y @ model.stem(x).t(), torch.arange(len(x)))


def test_a_loss_over_pairs() -> None:
    with pytest.raises(ValueError, match=r"samples of a batch meet .* mm makes a tensor of shape \(4, 4\) of 4"):
        check_apart(contrastive)


@pytest.mark.parametrize(
    "step",
    [
        lambda m, x: F.cosine_similarity(m.body(x), m.body(x).roll(1, 0)).mean(),
        lambda m, x: (m.body(x).sum(-1) * m.body(x).sum(-1).detach().softmax(0)).sum(),
        lambda m, x: (0.7 * m.body(x) + 0.3 * m.body(x).flip(0)).square().mean(),
        lambda m, x: (m.body(x).sum(-1).sort().values * torch.linspace(0, 1, len(x))).mean(),
        lambda m, x: m.body(x).cumsum(dim=0).square().mean(),
        lambda m, x: m.body(x).flatten().roll(1).square().mean(),
    ],
)
def test_orders_of_samples(step: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"samples of a batch meet .* of 4 samples and .* each of which depends on"):
        check_apart(step)


def test_a_step_for_one_number_of_samples_only() -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        if len(x) != SAMPLES:
            raise OwnError("eight only")
        return contrastive(model, x)

    with pytest.raises(ValueError, match=r"fails on a microbatch of 2 of them \(OwnError: eight only\).*=1"):
        check_apart(step)


def test_a_step_that_could_not_be_followed_either(caplog: pytest.LogCaptureFixture) -> None:
    check_apart(breaks_off, complete=False)
    assert "could not be checked, because on 4 or 8 samples the step failed: OwnError" in caplog.text


def test_pairs_before_the_step_could_not_be_followed() -> None:
    def step(model: Model, x: Tensor) -> None:
        contrastive(model, x)
        raise OwnError

    with pytest.raises(ValueError, match="samples of a batch meet"):
        check_apart(step, complete=False)


def test_pairs_in_loops(caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        rows = list(model.body(x))
        return torch.stack([(one * other).sum() for one in rows for other in rows]).logsumexp(0)

    check_apart(step)
    assert "could not be checked, because on 8 samples the step does something else than on 4" in caplog.text


def test_loops_over_samples_are_no_pairs(caplog: pytest.LogCaptureFixture) -> None:
    check_apart(lambda model, x: torch.stack([row.square().sum() for row in model.body(x)]).mean())
    assert not caplog.records


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda m, x: F.batch_norm(m.body(x), None, None, training=True).mean(), "batch_norm"),
        (lambda m, x: (m.body(x) - m.body(x).mean(0)).square().mean(), "sub"),
        (lambda m, x: (m.body(x) / m.body(x).std()).mean(), "div"),
    ],
)
def test_statistics_of_the_batch(step: Callable[..., Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    check_apart(step)
    assert "looks at all samples of a batch at once" in caplog.text
    assert said in caplog.text


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda m, x: (m.body(x).mean() * m.scale).exp(), "exp"),
        (lambda m, x: m.body(x).mean() ** 2, "pow"),
        (lambda m, x: m.body(x).var(0).sum(), "var"),
        (lambda m, x: m.body(x).mean(0).abs().sum(), "abs"),
        (lambda m, x: m.body(x).mean(0).norm(), "linalg_vector_norm"),
        (lambda m, x: m.body(x).sum(-1).logsumexp(0), "logsumexp"),
        (lambda m, x: F.mse_loss(m.body(x).mean(0), x.mean(0)), "mse_loss"),
        (lambda m, x: 1 / m.body(x).square().sum(), "reciprocal"),
        (lambda m, x: m.body(x).mean() / m.body(x).square().mean(), "div"),
        (lambda m, x: m.body(x).amax(), "amax"),
        (lambda m, x: 0.5 + (m.body(x).mean() - 0.5).relu(), "relu"),
        (lambda m, x: {"loss": m.body(x).square().mean().sqrt()}, "sqrt"),
    ],
)
def test_losses_that_are_no_sums(step: Callable[..., Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    check_apart(step)
    (record,) = caplog.records
    assert f"and is no sum over them: {said} makes" in record.message


@pytest.mark.parametrize(
    ("step", "growth"),
    [
        (lambda m, x: m.body(x).sum(), 2),
        (lambda m, x: m.body(x).square().sum() / WIDTH + m.head.weight.square().sum(), 2),
        (lambda m, x: F.cross_entropy(m.body(x), torch.arange(len(x)) % WIDTH, reduction="sum"), 2),
        (lambda m, x: {"loss": F.mse_loss(m.body(x), torch.ones(len(x), WIDTH), reduction="sum") * m.scale}, 2),
        (lambda m, x: m.body(x).mean() / len(x) + m.body(x).mean(), 0.5),
        (lambda m, x: m.body(x).sum() * len(x), 4),
    ],
)
def test_losses_that_grow_with_the_batch(
    step: Callable[..., Any], growth: float, caplog: pytest.LogCaptureFixture
) -> None:
    check_apart(step)
    (record,) = caplog.records
    assert f"the loss is {growth} times as large" in record.message


def some_ignored(x: Tensor) -> Tensor:
    return torch.where(torch.arange(len(x)) % 4 > 0, 0, -100)


def masked(m: Model, x: Tensor) -> Tensor:
    mask = torch.arange(len(x)) % 4 > 0
    return (m.body(x).mean(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda m, x: masked(m, x) + m.head.weight.square().sum(), "div"),
        (lambda m, x: masked(m, x) + m.body(x).square().mean(), "div"),
        (lambda m, x: F.cross_entropy(m.body(x), some_ignored(x)) + (m.head.weight @ x.mean(0)).sum(), "nll"),
        (lambda m, x: masked(m, x) + F.cross_entropy(m.body(x), torch.arange(len(x)) % WIDTH), "div"),
        (lambda m, x: F.cross_entropy(m.body(x), some_ignored(x)) + m.body(x).square().mean(), "nll_loss_forward"),
        (lambda m, x: F.cross_entropy(m.body(x), some_ignored(x), label_smoothing=0.1) + m.body(x).mean(), "nll"),
    ],
)
def test_means_of_what_is_left_beside_other_parts(
    step: Callable[..., Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_apart(step)
    (record,) = caplog.records
    assert f"a mask or ignored targets leave ({said}" in record.message


def left(x: Tensor) -> Tensor:
    """A mask of the values of samples, which leaves three of four."""
    return x[:, 0] > 0


def masked_samples() -> Tensor:
    x = torch.randn(SAMPLES, WIDTH)
    x[:, 0] = torch.where(torch.arange(SAMPLES) % 4 > 0, 1.0, -1.0)
    return x


Made = Callable[[Tensor, Tensor], Tensor]
UNKNOWN: list[Made] = [
    lambda y, kept: (y.mean(-1) * kept).sum() * (1.0 / kept.sum()),
    lambda y, kept: (y.mean(-1) * kept).sum() * kept.sum().item() ** -1,
    lambda y, kept: (y.mean(-1) * kept / kept.sum()).sum(),
    lambda y, kept: y.mean(-1) @ (kept.float() / kept.sum()),
    lambda y, kept: (y.mean(-1) * (kept / kept.float().mean())).mean(),
    lambda y, kept: torch.mean(y[kept]),
    lambda y, kept: y[kept].mean(-1).mean(0),
    lambda y, kept: torch.nanmean(torch.where(kept[:, None], y, torch.nan)) + y.square().mean(),
    lambda y, kept: (y.mean(-1) * kept).mean() / kept.float().mean() + y.square().mean(),
    lambda y, kept: y.index_select(0, kept.nonzero().squeeze(1)).mean() + y.square().mean(),
    lambda y, kept: y[y.argmax(-1) > 0].mean() + y.square().mean(),
    lambda y, kept: F.ctc_loss(y[kept].log_softmax(-1), torch.ones(1).long(), kept.sum()[None], torch.ones(1).long()),
    lambda y, kept: F.kl_div(y[kept], torch.ones(int(kept.sum()), WIDTH), reduction="batchmean"),
    lambda y, kept: y.sum() * (1.0 / (y.argmax(-1) > 0).sum()),
]


@pytest.mark.parametrize("made", UNKNOWN)
def test_means_by_hand_that_a_step_does_not_know(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    require_apart(model, Sample(lambda x: made(model.body(x), left(x)), masked_samples(), HOST), 4, True)
    assert "WARNING" in {record.levelname for record in caplog.records}


@pytest.mark.parametrize("count", range(5))
def test_masks_that_leave_so_many_of_the_samples_that_are_looked_at(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Model(), masked_samples()
    x[:, 0] = torch.where(torch.arange(SAMPLES) % (SAMPLES // 2) < count, 1.0, -1.0)
    step = Sample(lambda x: (model.body(x).mean(-1) * left(x)).sum() / left(x).sum(), x, HOST)
    require_apart(model, step, 2, True)
    assert not caplog.records


@pytest.mark.parametrize(
    "made",
    [
        lambda y, kept: (y.mean(-1) * kept).mean() / kept.float().mean(),
        lambda y, kept: y.index_select(0, kept.nonzero().squeeze(1)).mean(),
        lambda y, kept: (y.mean(-1) * kept).sum() / kept.sum(),
        lambda y, kept: y[kept].mean(),
        lambda y, kept: F.multi_margin_loss(y[kept], torch.zeros(int(kept.sum())).long()),
        lambda y, kept: F.triplet_margin_loss(y[kept], y[kept] + 1, y[kept] * 2),
        lambda y, kept: F.l1_loss(y[kept], torch.zeros(int(kept.sum()), WIDTH)),
        lambda y, kept: F.nll_loss(y[kept], torch.zeros(int(kept.sum())).long()),
        lambda y, kept: F.mse_loss(y[kept], torch.zeros(int(kept.sum()), WIDTH), reduction="sum") / kept.sum(),
    ],
)
def test_means_by_hand_that_a_step_knows(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    with Means():  # from then on torch's own methods are watched
        model = Model()
    require_apart(model, Sample(lambda x: made(model.body(x), left(x)), masked_samples(), HOST), 4, True)
    assert not caplog.records


def test_lists_of_as_many_as_a_mask_leaves(caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        kept = [row.square().mean() for row, counts in zip(model.body(x), x[:, 0] > 0, strict=True) if counts]
        return torch.stack(kept).mean()

    model, x = Model(), torch.ones(SAMPLES, WIDTH)
    require_apart(model, Sample(lambda x: step(model, x), x, HOST), 4, True)
    assert not caplog.records
    x[-1] = -1.0
    require_apart(model, Sample(lambda x: step(model, x), x, HOST), 4, True)
    assert "a loop makes 3 elements of 4 samples, and 4 of 4 others" in caplog.text


def test_inputs_that_are_scaled_by_those_of_all(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    sample = Sample(lambda x: model.body((x - x.mean(0)) / x.std(0)).mean(), torch.randn(SAMPLES, WIDTH), HOST)
    (meeting,) = meetings(model, sample, 4, True, model.blocks[-1])
    assert "looks at all samples of a batch at once" in meeting.what
    assert meeting.in_blocks


def test_the_samples_with_the_largest_losses() -> None:
    with pytest.raises(ValueError, match=r"topk makes .* each of which depends on others of them"):
        check_apart(lambda m, x: m.body(x).square().sum(-1).topk(len(x) // 2).values.mean())


def test_states_that_every_microbatch_would_change(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.register_buffer("centre", torch.zeros(WIDTH))
    torch.nn.utils.parametrizations.spectral_norm(model.head)

    def step(x: Tensor) -> Tensor:
        model.centre.lerp_(x.mean(0), 0.1)
        return model.head(model.body(x - model.centre)).mean()

    meeting, *_ = meetings(model, Sample(step, torch.randn(SAMPLES, WIDTH), HOST), 4, True, model.blocks[-1])
    assert meeting.in_blocks  # each sample meets the mean of all
    assert "buffers that it changes" in caplog.text
    for name in ("centre", "head.parametrizations.weight.0._u"):
        assert name in caplog.text


@pytest.mark.parametrize(
    "count",
    [
        lambda chosen: F.one_hot(chosen, WIDTH).float().mean((0, 1)),
        lambda chosen: torch.histc(chosen.float(), bins=WIDTH, min=0, max=WIDTH - 1),
    ],
)
def test_losses_that_balance_experts(count: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture) -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        chances = model.body(x).softmax(-1)
        return chances.square().mean() + (count(chances.topk(2).indices) * chances.mean(0)).sum()

    check_apart(step)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "mul makes a tensor of shape (4,)), as losses of routers do" in caplog.text


@pytest.mark.parametrize(
    "step",
    [
        plain,
        lambda m, x: F.layer_norm(m.body(x), (WIDTH,)).mean(),
        lambda m, x: F.group_norm(m.body(x), 2).mean(),
        lambda m, x: F.instance_norm(m.body(x).unsqueeze(1)).mean(),
        lambda m, x: m.body(x).mean() * m.scale.exp(),
        lambda m, x: torch.stack([m.scale * 2, m.body(x).mean()]).sum() + torch.cat(m.body(x).split(1)).mean(),
        lambda m, x: 0.5 * m.body(x).mean() + 2 - m.body(x).sum(0)[:3].mean() / len(x),
        lambda m, x: (m.body(x).mean(), m.body(x).mean().exp())[0],
        lambda m, x: {"loss": m.body(x).square().mean(), "perplexity": m.body(x).mean().exp()},
        lambda m, x: F.mse_loss(m.body(x), x.repeat(1, 3)[:, : m.body(x).shape[1]], reduction="sum") / len(x),
        lambda m, x: (m.body(x).mean(-1) * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum(),
        lambda m, x: m.body(x)[torch.arange(len(x) // 2)].sum() / torch.tensor(float(len(x))),
        lambda m, x: (m.body(x) / len(x)).sum() * m.scale,
        lambda m, x: m.body(x - x.mean(1, keepdim=True)).mean(),
        lambda m, x: m.body(x * torch.ones_like(x).sum() / x.new_ones(len(x)).sum()).mean(),
        lambda m, x: F.batch_norm(m.body(x), torch.zeros(WIDTH), torch.ones(WIDTH)).mean(),
        lambda m, x: F.cross_entropy(m.body(x), torch.arange(len(x)) % WIDTH, label_smoothing=0.1),
        lambda m, x: F.cross_entropy(m.body(x), some_ignored(x), label_smoothing=0.1),
        lambda m, x: F.cross_entropy(m.body(x), torch.arange(len(x)) % WIDTH) + m.head.weight.square().sum(),
        lambda m, x: F.cross_entropy(m.body(x), some_ignored(x)) + 0.1 * m.head.weight.square().sum() - m.scale,
        lambda m, x: (m.body(x).softmax(-1).sort(-1).values.cumsum(-1).flip(1).roll(1, -1)).mean(),
        lambda m, x: m.body(x)[m.body(x).argmax(-1).argsort()].mean(),  # as tokens in the order of their experts
    ],
)
def test_samples_that_count_by_themselves(step: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    check_apart(step)
    assert not caplog.records
