"""What one look at a step finds: in one process, without values."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.plan import ParallelPlan
from lightning_parallel.techniques.pipeline_parallel.layout import StageLayout, StepTrace, cut
from lightning_parallel.techniques.pipeline_parallel.trace import trace_step
from lightning_parallel.values import batch_size, map_tensors

WIDTH, SAMPLES = 4, 8
HOST = torch.device("cpu")


class Model(nn.Module):
    """Four blocks between a stem and a head; `scale` belongs to no module of its own."""

    def __init__(self, block: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def look(model: Model, step: Callable[..., Any], batch: Any = None) -> StepTrace:
    blocks = {name: module for name, module in model.named_modules() if name in {f"blocks.{k}" for k in range(4)}}
    batch = torch.randn(SAMPLES, WIDTH) if batch is None else batch
    return trace_step(model, blocks, lambda: step(model, batch), HOST)


def stages_of(seen: StepTrace, name: str) -> frozenset[int]:
    return StageLayout(seen, (2, 2)).stages_of(name)


def plain(model: Model, x: Tensor) -> Tensor:
    return model.head(model.body(model.stem(x))).mean()


# ---------------------------------------------------------------- the end of the step


class OwnError(Exception):
    pass


def breaks_off(model: Model, x: Tensor) -> Tensor:
    before = model.stem(x * model.scale)
    hidden = model.body(before)
    raise OwnError("cannot go on")
    return (model.head(hidden) * model.scale + before).mean()


def test_end_that_was_not_seen_may_use_anything(caplog: pytest.LogCaptureFixture) -> None:
    seen = look(Model(), breaks_off)
    assert not seen.complete
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "OwnError: cannot go on" in caplog.text
    for name in ("scale", "stem.weight", "head.weight"):
        assert 1 in stages_of(seen, name), name
    assert stages_of(seen, "blocks.0.weight") == {0}
    assert StageLayout(seen, (2, 2)).carried["stem", 0].last == 1  # `before` is still there when the step breaks off


@pytest.mark.parametrize(
    "leave",
    [
        lambda h: h.detach().cpu().numpy().mean(),
        lambda h: numpy.asarray(h).sum(),
        lambda h: h.tolist()[0][0],
        lambda h: float(h.detach().mean()),
        lambda h: float(f"{h.mean():.3f}"),
        lambda h: h.norm().item(),
    ],
)
def test_values_that_python_asks_for(leave: Callable[[Tensor], Any], caplog: pytest.LogCaptureFixture) -> None:
    """The look goes on with made-up ones, and what they were made of is there wherever they may be used."""

    def step(model: Model, x: Tensor) -> Tensor:
        factor = leave(model.stem(x) * model.scale)
        hidden = model.body(x)
        return (model.head(hidden) * factor).mean() + leave(hidden)

    seen = look(Model(), step)
    assert seen.complete
    assert not caplog.records
    assert stages_of(seen, "head.weight") == {1}
    assert stages_of(seen, "scale") == {0, 1}
    assert StageLayout(seen, (2, 2)).carried["stem", 0].last == 1


class Tells(nn.Linear):
    """Beside what it computes, what it was given, and a tensor of the batch alone."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x), mask, mask * 2


def test_outputs_without_parameters_go_past_a_cut() -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        given = x > 0
        x, mask, twice = model.stem(x, given)
        weights, first = twice + 1, []
        for block in model.blocks:
            x, same, _ = block(x, mask)
            first.append(same)
        assert weights.max() == 3  # known, so code may decide by it
        return (x * first[0] * weights).mean()

    model = Model(lambda: Tells(WIDTH, WIDTH))
    model.stem = Tells(WIDTH, WIDTH)
    carried = StageLayout(look(model, step), (2, 2)).carried
    assert {call: one.numbers for call, one in carried.items()} == {("blocks.0", 0): {1}}


# ---------------------------------------------------------------- what has no shapes-only form


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any) -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x)[0]
        return model.head(x).mean()

    seen = look(Model(lambda: kind(WIDTH, WIDTH, batch_first=True)), step, torch.randn(SAMPLES, 3, WIDTH))
    assert seen.uses["blocks.1.weight_hh_l0"] == {3}
    assert stages_of(seen, "blocks.3.bias_ih_l0") == {1}


class GetsASize(nn.Linear):
    def forward(self, x: Tensor, size: torch.Size) -> Tensor:
        return super().forward(x.view(size))


def test_sizes_as_arguments() -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x, x.shape)
        return x.mean()

    assert look(Model(lambda: GetsASize(WIDTH, WIDTH)), step).complete


class Renews(nn.Module):
    """Puts a new module in the place of one of its own whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        self.act = nn.Sequential(nn.Tanh())
        return self.act(self.layer(x))


def test_modules_that_are_replaced_are_not_taken_for_others() -> None:
    calls = look(Model(Renews), plain).calls
    assert not {name for name in calls if ".act" in name}
    assert all(calls[f"blocks.{k}"] == {2 * k + 1} for k in range(4))


def test_what_hooks_collect_is_collected_once() -> None:
    """Blocks are called again only after the step: hooks of the user's do not see that."""

    def step(model: Model, x: Tensor) -> Tensor:
        collected: list[Tensor] = []
        hooks = [block.register_forward_hook(lambda *seen: collected.append(seen[-1])) for block in model.blocks]
        x = model.body(x)
        for hook in hooks:
            hook.remove()
        return torch.cat(collected, -1).view(SAMPLES, 4 * WIDTH).mean()

    seen = look(Model(), step)
    assert seen.complete
    assert StageLayout(seen, (2, 2)).carried["blocks.0", 0].last == 1


class Sorts(nn.Linear):
    """Splits its input by counts that it reads from a tensor, as some experts do."""

    def forward(self, x: Tensor) -> Tensor:
        counts = (super().forward(x) > 0).sum(0).tolist()
        return torch.cat([part.square() for part in x.repeat(WIDTH, 1).split(counts)])[: len(x)]


def test_sizes_of_a_split_that_come_from_values() -> None:
    assert look(Model(lambda: Sorts(WIDTH, WIDTH)), plain).complete


class WritesIntoEmpty(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.empty_like(torch.zeros(x.shape)).copy_(super().forward(x))


def test_memory_that_was_never_written_is_no_state() -> None:
    assert look(Model(lambda: WritesIntoEmpty(WIDTH, WIDTH)), plain).complete


# ---------------------------------------------------------------- more than shapes: hooks on activations, quantiles


class Does(nn.Linear):
    """Does something with what it computes."""

    def __init__(self, act: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        found = self.act(y)
        return y if found is None else y + found.view(-1, 1)


def hooked(y: Tensor) -> None:
    y.register_hook(lambda gradient: gradient * 0.5).remove()
    y.register_hook(torch.zeros_like)


@pytest.mark.parametrize("act", [hooked, lambda y: y.retain_grad()])
def test_hooks_on_activations_of_blocks(act: Callable[[Tensor], None]) -> None:
    assert look(Model(lambda: Does(act)), plain).complete


QUANTILES: list[Callable[[Tensor], Tensor]] = [
    lambda y: torch.quantile(y, 0.9, dim=-1),
    lambda y: torch.quantile(y, q=0.5, dim=-1, interpolation="lower"),
    lambda y: y.quantile(0.9, dim=-1, keepdim=True),
    lambda y: torch.nanquantile(y, 1, dim=-1),
    lambda y: torch.quantile(input=y, q=0.9, dim=-1),
    lambda y: torch.quantile(y, torch.tensor([0.1]), dim=-1),
]


@pytest.mark.parametrize("act", QUANTILES)
def test_quantiles_in_blocks(act: Callable[[Tensor], Tensor]) -> None:
    assert look(Model(lambda: Does(act)), plain).complete


# ---------------------------------------------------------------- gradients within a step


def penalty(model: Model, x: Tensor, requires: Callable[[Tensor], Any]) -> Tensor:
    x = x.clone()
    requires(x)
    y = model.body(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + gradient.norm()


def by_transform(model: Model, x: Tensor) -> Tensor:
    return torch.func.grad(lambda z: model.body(z).sum())(x).norm()


def by_backward(model: Model, x: Tensor) -> Tensor:
    loss = plain(model, x)
    loss.backward()
    return loss


def to_an_early_weight(model: Model, x: Tensor) -> Tensor:
    y = plain(model, x)
    return y + torch.autograd.grad(y, model.stem.weight, create_graph=True)[0].norm()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda m, x: penalty(m, x, lambda t: t.requires_grad_()), r"made in block .* used behind the blocks.*Zero"),
        (lambda m, x: penalty(m, x, lambda t: setattr(t, "requires_grad", True)), r"made in block .* is used behind"),
        (by_transform, r"block blocks\.0 runs inside a transform of torch\.func.*ZeroStrategy"),
        (lambda m, x: torch.func.grad(lambda z: plain(m, z))(x).norm(), r"block blocks\.0 runs inside a transform"),
        (by_backward, r"the step calls backward.*ZeroStrategy"),
        (to_an_early_weight, r"made in block .* is used behind the blocks"),
    ],
)  # fmt: skip
def test_gradients_that_would_pass_stages_are_refused(step: Callable[..., Any], said: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        cut(look(Model(), step), 2)


def test_gradients_after_the_last_block() -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        hidden = model.body(model.stem(x)).requires_grad_()
        y = model.head(hidden).sum()
        to_hidden, to_weight = torch.autograd.grad(y, [hidden, model.head.weight], create_graph=True)
        return y + to_hidden.norm() + to_weight.norm()

    assert look(Model(), step).complete


# ---------------------------------------------------------------- refusals that say what to do


def shared(model: Model, x: Tensor) -> Tensor:
    return model.body(model.body(x)).mean()


def the_first_two(model: Model, x: Tensor) -> Tensor:
    return model.blocks[1](model.blocks[0](x)).mean()


def dropped(model: Model, x: Tensor) -> Tensor:
    for number, block in enumerate(model.blocks):
        x = x if number == 1 else block(x)
    return x.mean()


def by_forward(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block.forward(x)
    return x.mean()


def fails_early(model: Model, x: Tensor) -> Tensor:
    raise OwnError("no values")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (shared, r"block blocks\.0 runs twice.*ZeroStrategy"),
        (the_first_two, r"without the blocks blocks\.2, .*ParallelPlan\(blocks=\('blocks\.0', 'blocks\.1'\)\)"),
        (dropped, r"without the blocks blocks\.1;.*LayerDrop.*set its probability to 0"),
        (by_forward, r"call them as modules, layer\(x\) and not layer\.forward\(x\)"),
    ],
)  # fmt: skip
def test_refusals(step: Callable[..., Any], said: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        look(Model(), step)


def test_error_of_the_step_stays_the_same_error() -> None:
    with pytest.raises(OwnError, match="no values") as caught:
        look(Model(), fails_early)
    assert "raised before the block blocks.0, while the step was analyzed" in caught.value.__notes__[0]


def test_model_without_known_layers_gets_a_plan_to_start_from() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    model = nn.ModuleDict({"network": network})
    with pytest.raises(ValueError, match=r"ZeroStrategy or DataParallelStrategy") as caught:
        ParallelPlan(source="the structure").require_blocks(model, "PipelineParallel(2)")
    names = ("network.0", "network.3", "network.5")
    assert f"plan=ParallelPlan(blocks={names!r})" in str(caught.value)

    blocks = ParallelPlan(blocks=names).require_blocks(model, "PipelineParallel(2)")
    seen = trace_step(model, blocks, lambda: network(torch.randn(2, 1, 4, 4)).mean(), HOST)
    assert seen.blocks == names


# ---------------------------------------------------------------- the number of samples


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ({"x": torch.zeros(3, 2), "y": torch.zeros(3), "z": torch.zeros(())}, 3),
        (["a", "bc", "d"], 3),
        ({"text": ["a", "bc"], "label": ("x", "y")}, 2),
        ([("a", "b"), ("c", "d"), ("e", "f")], None),
        ({"scalar": 3}, None),
        ({"texts": ["a", "b"], "labels": ["x", "y", "z"]}, 2),
    ],
)
def test_number_of_samples(batch: Any, size: int | None) -> None:
    assert batch_size(batch) == size


def test_tuples_of_all_kinds_are_rebuilt() -> None:
    named = torch.zeros(2, 3).max(0)
    value = {"size": torch.Size([2, 3]), "named": named, "plain": (torch.zeros(1), 2)}
    again = map_tensors(lambda tensor: tensor, value)
    assert [type(item) for item in again.values()] == [torch.Size, type(named), tuple]


class Casting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super(Casting, self.to(torch.float64)).forward(x.double()).to(x.dtype)


def test_parameters_stay_the_same_ones() -> None:
    model = Model(lambda: Casting(WIDTH, WIDTH))
    before = dict(model.named_parameters())
    seen = look(model, lambda model, x: model.body(model.stem(x)).sum())
    assert all(after is before[name] and after.dtype == torch.float32 for name, after in model.named_parameters())
    assert seen.casts == {f"blocks.{k}.{name}": torch.float64 for k in range(4) for name in ("bias", "weight")}
