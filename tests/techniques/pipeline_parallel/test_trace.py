"""Analysis of a step before a pipeline runs it, in one process and without values; which layers are its blocks."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.plan import ParallelPlan
from lightning_parallel.plan.find import find_plan, running_blocks
from lightning_parallel.techniques.pipeline_parallel.layout import StageLayout, StepTrace, cut
from lightning_parallel.techniques.pipeline_parallel.trace import trace_step
from lightning_parallel.techniques.tools.absent import Absent
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


def analyze(model: Model, step: Callable[..., Any], batch: Any = None) -> StepTrace:
    blocks = {name: module for name, module in model.named_modules() if name in {f"blocks.{k}" for k in range(4)}}
    batch = torch.randn(SAMPLES, WIDTH) if batch is None else batch
    return trace_step(model, blocks, lambda: step(model, batch), HOST)


def stages_of(seen: StepTrace, name: str) -> frozenset[int]:
    return StageLayout(seen, (2, 2)).stages_of(name)


def plain(model: Model, x: Tensor) -> Tensor:
    return model.head(model.body(model.stem(x))).mean()


class OwnError(Exception):
    pass


def breaks_off(model: Model, x: Tensor) -> Tensor:
    before = model.stem(x * model.scale)
    hidden = model.body(before)
    raise OwnError("cannot go on")
    return (model.head(hidden) * model.scale + before).mean()


def test_end_that_was_not_analyzed_may_use_anything(caplog: pytest.LogCaptureFixture) -> None:
    seen = analyze(Model(), breaks_off)
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
        lambda h: float(f"{h.mean():.3f}"),
        lambda h: h.norm().item(),
    ],
)
def test_values_that_python_needs_are_made_up(leave: Callable[[Tensor], Any], caplog: pytest.LogCaptureFixture) -> None:
    """Their sources are on every stage where they may be used."""

    def step(model: Model, x: Tensor) -> Tensor:
        factor = leave(model.stem(x) * model.scale)
        hidden = model.body(x)
        return (model.head(hidden) * factor).mean() + leave(hidden)

    seen = analyze(Model(), step)
    assert seen.complete
    assert not caplog.records
    assert stages_of(seen, "head.weight") == {1}
    assert stages_of(seen, "scale") == {0, 1}
    assert StageLayout(seen, (2, 2)).carried["stem", 0].last == 1


def test_recurrent_layers_are_analyzed() -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x)[0]
        return model.head(x).mean()

    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        seen = analyze(Model(partial(kind, WIDTH, WIDTH, batch_first=True)), step, torch.randn(SAMPLES, 3, WIDTH))
        assert seen.uses["blocks.1.weight_hh_l0"] == {3}
        assert stages_of(seen, "blocks.3.bias_ih_l0") == {1}


class Does(nn.Linear):
    """Does something with what it computes."""

    def __init__(self, act: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        found = self.act(x, y)
        return y if found is None else y + found.view(len(y), -1)


def hooked(x: Tensor, y: Tensor) -> None:
    y.register_hook(lambda gradient: gradient * 0.5).remove()
    y.register_hook(torch.zeros_like)


def sorts(x: Tensor, y: Tensor) -> Tensor:
    """Splits its input by counts that it reads from a tensor, as some experts do."""
    counts = (y > 0).sum(0).tolist()
    return torch.cat([part.square() for part in x.repeat(WIDTH, 1).split(counts)])[: len(x)]


ACTS: list[Callable[[Tensor, Tensor], Any]] = [
    hooked,
    lambda x, y: y.retain_grad(),
    sorts,
    lambda x, y: torch.empty_like(torch.zeros(x.shape)).copy_(y),  # memory that was never written is no state
    lambda x, y: torch.quantile(y, q=0.5, dim=-1, interpolation="lower"),
    lambda x, y: y.quantile(0.9, dim=-1, keepdim=True),
    lambda x, y: torch.nanquantile(y, 1, dim=-1),
    lambda x, y: torch.quantile(input=y, q=0.9, dim=-1),
    lambda x, y: torch.quantile(y, torch.tensor([0.1]), dim=-1),
]


@pytest.mark.parametrize("number", range(len(ACTS)))
def test_blocks_with_hooks_splits_and_quantiles_are_analyzed(number: int) -> None:
    assert analyze(Model(lambda: Does(ACTS[number])), plain).complete


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
        (lambda m, x: penalty(m, x, lambda t: t.requires_grad_()), r"made in block .* used after the blocks.*Zero"),
        (lambda m, x: penalty(m, x, lambda t: setattr(t, "requires_grad", True)), r"made in block .* is used after"),
        (by_transform, r"block blocks\.0 runs inside a transform of torch\.func.*ZeroStrategy"),
        (by_backward, r"the step calls backward.*ZeroStrategy"),
        (to_an_early_weight, r"made in block .* is used after the blocks"),
    ],
)  # fmt: skip
def test_gradients_that_would_pass_stages_are_refused(step: Callable[..., Any], said: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        cut(analyze(Model(), step), 2)


def test_gradients_after_the_last_block_are_analyzed() -> None:
    def step(model: Model, x: Tensor) -> Tensor:
        hidden = model.body(model.stem(x)).requires_grad_()
        y = model.head(hidden).sum()
        to_hidden, to_weight = torch.autograd.grad(y, [hidden, model.head.weight], create_graph=True)
        return y + to_hidden.norm() + to_weight.norm()

    assert analyze(Model(), step).complete


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
def test_steps_without_all_blocks_once_are_refused(step: Callable[..., Any], said: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=said):
        analyze(Model(), step)


def test_error_of_the_step_stays_the_same_error() -> None:
    with pytest.raises(OwnError, match="no values") as caught:
        analyze(Model(), fails_early)
    assert "raised before the block blocks.0, while the step was analyzed" in caught.value.__notes__[0]


class Closed(nn.Linear):
    """Takes no other weight."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Absent):
            raise OwnError(name)
        super().__setattr__(name, value)


def test_model_is_as_before_after_parameters_could_not_be_replaced() -> None:
    model = Model()
    model.head = Closed(WIDTH, WIDTH)
    before = dict(model.named_parameters())
    with pytest.raises(OwnError):
        analyze(model, plain)
    assert {name: parameter is before[name] for name, parameter in model.named_parameters()} == dict.fromkeys(
        before, True
    )
    assert {type(parameter) for parameter in before.values()} == {nn.Parameter}
    assert not torch.__future__.get_overwrite_module_params_on_conversion()


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


def test_samples_of_a_batch_are_counted() -> None:
    assert batch_size({"x": torch.zeros(3, 2), "y": torch.zeros(3), "z": torch.zeros(())}) == 3
    assert batch_size({"text": ["a", "bc"], "label": ("x", "y")}) == 2
    assert batch_size([("a", "b"), ("c", "d"), ("e", "f")]) is batch_size({"scalar": 3}) is None
    named = torch.zeros(2, 3).max(0)
    again = map_tensors(lambda tensor: tensor, {"size": torch.Size([2, 3]), "named": named, "plain": (1, 2)})
    assert [type(item) for item in again.values()] == [torch.Size, type(named), tuple]


class Layer(nn.Linear):
    pass


class Multimodal(nn.Module):
    """A tower for images, and layers for texts; by the metadata both are blocks, by the structure the larger list."""

    def __init__(self, classes: list[str]) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Layer(8, 8) for _ in range(3))
        self.texts = nn.ModuleList(Layer(4, 4) for _ in range(2))
        self._no_split_modules = classes


class Named(Multimodal):
    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("tower.*", "texts.*"))


@pytest.mark.parametrize("classes", [["Layer"], []])
def test_lists_that_run_completely_are_blocks(classes: list[str]) -> None:
    model = Multimodal(classes)
    plan = find_plan(model)
    assert plan.inferred
    assert "tower.0" in plan.find_blocks(model)
    for layers, found in ((2, ["texts.0", "texts.1"]), (1, []), (0, [])):
        assert [*running_blocks(plan, model, {"", *(f"texts.{k}" for k in range(layers))})] == found


def test_plans_that_somebody_names_are_not_inferred() -> None:
    assert not find_plan(Named([])).inferred
    assert not find_plan(Multimodal([]), ParallelPlan(blocks="tower.*")).inferred
    both = Multimodal(["Layer"])
    plan = find_plan(both, ParallelPlan(whole_batch="texts.1"))  # which adds to the inferred one
    assert (plan.whole_batch, plan.inferred, len(plan.find_blocks(both))) == (("texts.1",), True, 5)
    model = Multimodal([])  # a model of Hugging Face may name patterns in its configuration, and no classes
    model.config = SimpleNamespace(base_model_fsdp_plan={"texts.*": "free_full_weight", "norm": "keep_full_weight"})
    assert find_plan(model).blocks == ("texts.*",)
    assert find_plan(model).source == "the metadata of Multimodal"
