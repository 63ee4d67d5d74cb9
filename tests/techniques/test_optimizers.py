"""Every optimizer of torch, and users' own, step shards as one device steps whole parameters."""

import os
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_parallel.strategies.named import DataParallelStrategy, PipelineParallelStrategy, ZeroStrategy
from lightning_parallel.strategies.refusals import optimizer_faults, refuse
from lightning_parallel.techniques.gradients.elementwise import is_elementwise, steps_each_parameter
from tests.curves import Curve, Recorder, compare, compare_weights, train
from tests.models import build, loaders
from tests.ranks import begun_on_one, on_one, run_on_ranks
from tests.tiers import covering, sampled
from tests.trainers import trainer

LAYOUTS: dict[str, Callable[[], Any]] = {
    "data_parallel": partial(DataParallelStrategy, 2),
    "zero_1": partial(ZeroStrategy, 2, stage=1),
    "zero_2": partial(ZeroStrategy, 2, stage=2),
    "zero_3": partial(ZeroStrategy, 2, stage=3),
}


class TensorRatio(optim.Optimizer):
    """A user's own, in the manner of LAMB: every tensor's step is as long as the tensor, times the learning rate."""

    steps_each_parameter = True

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, group)
        return loss

    def move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["average"] = torch.zeros_like(parameter)
        average = state["average"].mul_(group["momentum"]).add_(parameter.grad)
        ratio = (parameter.norm() + 0.1) / (average.norm() + 1e-6)
        parameter.sub_(group["lr"] * ratio * average)


class MuonAndAdamW(optim.Optimizer):
    """What users write around Muon, which takes matrices only: AdamW for everything else, in one optimizer."""

    steps_each_parameter = True

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        every = list(parameters)
        self.parts = [
            optim.Muon([parameter for parameter in every if parameter.dim() == 2], lr=lr),
            optim.AdamW([parameter for parameter in every if parameter.dim() != 2], lr=lr, eps=1e-5),
        ]
        super().__init__(every, {"lr": lr})
        self.show_groups()

    def show_groups(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        self.show_groups()


class Blocks(Tensor):
    """A state of another form than its parameter, as of 8 bits: blocks of 256 and a scale for each; no slice of it."""

    def __new__(cls, codes: Tensor, scales: Tensor, shape: torch.Size) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, shape: torch.Size) -> None:
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, values: Tensor) -> "Blocks":
        flat = values.double().flatten()
        rows = nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
        scales = rows.abs().amax(1) + 1e-12
        return cls(rows / scales[:, None], scales, values.shape)

    def values(self) -> Tensor:
        rows = self.codes * self.scales[:, None]
        return rows.flatten()[: self.numel()].view(self.shape).float()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].codes, args[0].scales, args[0].shape)
        raise NotImplementedError(f"{func} of Blocks")


torch.serialization.add_safe_globals([Blocks])


class Blockwise(TensorRatio):
    """Keeps its averages in blocks, as torchao does, and the largest scales so far beside them."""

    def move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        before = state["average"].values() if state else torch.zeros_like(parameter)
        average = before * group["momentum"] + parameter.grad
        state["average"] = kept = Blocks.of(average)
        state["largest"] = torch.maximum(kept.scales, state.get("largest", kept.scales))
        assert state["largest"].shape == (-(-parameter.numel() // 256),)
        parameter.sub_(group["lr"] * average / state["largest"].mean().float())


EVERY: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD foreach": partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": partial(optim.Adam, lr=1e-2, eps=1e-5),
    "amsgrad": partial(optim.Adam, lr=1e-2, eps=1e-5, amsgrad=True),
    "Adam foreach": partial(optim.Adam, lr=1e-2, eps=1e-5, foreach=True),
    "Adam fused": partial(optim.Adam, lr=1e-2, eps=1e-5, fused=True),
    "AdamW": partial(optim.AdamW, lr=1e-2, eps=1e-5),
    "NAdam": partial(optim.NAdam, lr=1e-2, eps=1e-5),
    "RAdam": partial(optim.RAdam, lr=1e-2, eps=1e-5),
    "Adamax": partial(optim.Adamax, lr=1e-2, eps=1e-5),
    "Adadelta": partial(optim.Adadelta, lr=1.0, eps=1e-5),
    "Adagrad": partial(optim.Adagrad, lr=1e-2, eps=1e-5, initial_accumulator_value=0.1),
    "Adagrad fused": partial(optim.Adagrad, lr=1e-2, eps=1e-5, fused=True),
    "RMSprop": partial(optim.RMSprop, lr=1e-2, eps=1e-3, centered=True, momentum=0.5),
    "Rprop": partial(optim.Rprop, lr=1e-3),
    "ASGD": partial(optim.ASGD, lr=0.1),
    "Adafactor": partial(optim.Adafactor, lr=1e-2),
    "LBFGS": partial(optim.LBFGS, lr=0.1, max_iter=3),
    "LBFGS with line search": partial(optim.LBFGS, lr=1.0, max_iter=3, line_search_fn="strong_wolfe"),
    "TensorRatio": partial(TensorRatio, lr=0.02),
    "MuonAndAdamW": partial(MuonAndAdamW, lr=1e-2),
    "Blockwise": partial(Blockwise, lr=0.02),
}


LOOK_AROUND = ["Adafactor", "LBFGS", "LBFGS with line search", "TensorRatio", "MuonAndAdamW", "Blockwise"]
"""Those in which an element's step depends on other elements, or on the loss."""

OF_EACH_KIND = ["SGD foreach", "Adam fused", "AdamW", "Adagrad", "Rprop", *LOOK_AROUND]
"""By default; the others are exhaustive tests."""

COVERED = {
    "data_parallel": ["AdamW", *LOOK_AROUND],
    "zero_1": [name for name in OF_EACH_KIND if "LBFGS" not in name],  # it is refused there
    "zero_2": ["AdamW", *(name for name in LOOK_AROUND if "LBFGS" not in name)],
    "zero_3": [name for name in OF_EACH_KIND if "LBFGS" not in name],
}
SHORT = {"max_epochs": 2, "accumulate_grad_batches": 1, "gradient_clip_val": None, "limit_val_batches": 0}


def train_all(names: list[str], make_strategy: Callable[[], Any] | str = "auto", data_ranks: int = 1) -> dict[str, Any]:
    return {name: train_with(EVERY[name], make_strategy, data_ranks) for name in names}


def train_with(make_optimizer: Any, make_strategy: Callable[[], Any] | str, data_ranks: int) -> Curve:
    model = {"optimizer": make_optimizer, "blocks": 1}
    return train("plain", make_strategy, data_ranks=data_ranks, model=model, data={"samples": 16}, **SHORT)


def expected(name: str) -> Curve:
    curve: Curve = on_one(train_with, EVERY[name], "auto", 1)
    return curve


@sampled(1, "layout", LAYOUTS)
def test_optimizers_of_each_kind_train_as_on_one_device(layout: str) -> None:
    check_all(COVERED[layout], layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_optimizer_trains_as_on_one_device(layout: str) -> None:
    refused = "LBFGS" if layout != "data_parallel" else None
    check_all([name for name in EVERY if name not in COVERED[layout] and (not refused or refused not in name)], layout)


def check_all(names: list[str], layout: str) -> None:
    for name in names:
        begun_on_one(train_with, EVERY[name], "auto", 1)
    for rank, curves in enumerate(run_on_ranks(2, train_all, names, LAYOUTS[layout], data_ranks=2)):
        for name, got in curves.items():
            compare(expected(name), got, where=f"{name}, rank {rank}: ")


def train_on(names: list[str], first: Callable[[], Any], then: Callable[[], Any], data_ranks: int) -> dict[str, Any]:
    """Half of the training in one layout, the rest in another one."""
    return {name: halves(name, first, then, data_ranks) for name in names}


def halves(name: str, first: Callable[[], Any], then: Callable[[], Any], data_ranks: int) -> Curve:
    path = Path(os.environ["RANKS_SCRATCH"], f"{name}.ckpt")
    columns = {"optimizer": EVERY[name], "blocks": 1}
    half = trainer(first(), **(SHORT | {"max_epochs": 1}))
    half.fit(build("plain", **columns), *loaders("plain", 8 // data_ranks, samples=16))
    half.save_checkpoint(path)
    recorder = Recorder()
    model = build("plain", seed=9, **columns)
    trainer(then(), callbacks=[recorder], **SHORT).fit(
        model, *loaders("plain", 8 // data_ranks, samples=16), ckpt_path=path, weights_only=True
    )
    recorder.curve.weights.update(model.state_dict())
    return recorder.curve


@covering(
    keep=1,
    names=(["Adam fused", "Adafactor", "MuonAndAdamW"], ["momentum", "Blockwise", "TensorRatio"]),
    layouts=(("zero_3", "zero_1"), ("zero_2", "data_parallel"), ("zero_1", "zero_3")),
)
def test_state_goes_on_in_another_layout(names: list[str], layouts: tuple[str, str]) -> None:
    first, then = layouts
    for rank, curves in enumerate(run_on_ranks(2, train_on, names, LAYOUTS[first], LAYOUTS[then], data_ranks=2)):
        for name, got in curves.items():
            weights = expected(name).weights
            assert got.losses == pytest.approx(expected(name).losses[2:], rel=1e-5), f"{name}, rank {rank}"
            compare_weights(weights, got.weights, 1e-4, f"{name}, rank {rank}: ")


class Clipping(optim.AdamW):
    """A user's subclass that only wants another default."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0)


class Doubled(optim.SGD):
    """A user's subclass that steps in its own way."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step()


def test_who_may_step_shards() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert is_elementwise(optim.AdamW(parameters))
    assert is_elementwise(Clipping(parameters))
    assert not is_elementwise(Doubled(parameters, lr=1.0))
    assert not is_elementwise(optim.LBFGS(parameters))


class OverAll(optim.SGD):
    """Has one norm over all gradients, and what no copy of it can have."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.lock = threading.Lock()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        every = [each for group in self.param_groups for each in group["params"]]
        total = torch.stack([each.grad.norm() for each in every]).norm()
        for parameter in every:
            parameter.sub_(parameter.grad / total)
        return loss


def test_who_may_step_one_stage() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2))]
    assert steps_each_parameter(Clipping(parameters))
    assert steps_each_parameter(optim.Muon(parameters, lr=0.1))
    assert steps_each_parameter(TensorRatio(parameters, lr=0.1))
    assert not steps_each_parameter(Doubled(parameters, lr=1.0))
    assert not steps_each_parameter(optim.LBFGS(parameters))
    assert not steps_each_parameter(OverAll(parameters))


class Searching(optim.SGD):
    """Evaluates its closure again after it has moved."""

    def step(self, closure: Callable[[], Tensor]) -> Any:  # type: ignore[override]
        super().step(closure)
        return closure()


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "one norm in a pipeline": (
        OverAll,
        partial(PipelineParallelStrategy, 2, microbatches=2),
        r"OverAll is not known to step each parameter by itself.* optimizer.steps_each_parameter = True",
    ),
    "LBFGS on shards": (EVERY["LBFGS"], LAYOUTS["zero_2"], r"LBFGS evaluates its closure again .* ranks hold shards"),
    "a closure twice": (partial(Searching, lr=0.1), LAYOUTS["zero_3"], r"Searching evaluates its closure again within"),
}


def error_of(name: str) -> str:
    make_optimizer, strategy, _ = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError)) as caught:
        train_with(make_optimizer, strategy, 2)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_shards_and_stages_would_make_wrong_are_refused(name: str) -> None:
    for message in run_on_ranks(2, error_of, name):
        assert re.search(REFUSED[name][2], message), message


class Wrapping(optim.Optimizer):
    """Steps another optimizer, which has lists of parameters of its own or the same ones."""

    def __init__(self, parameters: Iterable[nn.Parameter], shares: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = optim.SGD(list(self.param_groups[0]["params"]), lr=0.1, momentum=0.9)
        if shares:
            self.inner.param_groups[0]["params"] = self.param_groups[0]["params"]

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        return self.inner.step(closure)


def wrapping_refused(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"Wrapping.inner is a SGD with lists .* use DataParallelStrategy"):
        train_with(partial(Wrapping, shares=False), strategy, 2)


@sampled(1, "layout", ["zero_3", "zero_2", "zero_1"])
def test_wrapped_optimizers_share_their_lists_or_are_refused(layout: str) -> None:
    run_on_ranks(2, wrapping_refused, LAYOUTS[layout])
    one = on_one(train_with, partial(Wrapping, shares=True), "auto", 1)
    for got in run_on_ranks(2, train_with, partial(Wrapping, shares=True), LAYOUTS[layout], 2):
        compare(one, got)


class Sparse(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.table(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


def refused(make_strategy: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"sparse gradients .* use sparse=False"):
        trainer(make_strategy(), max_steps=1).fit(Sparse(), DataLoader(torch.arange(8), 4))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_gradients_are_refused(layout: str) -> None:
    run_on_ranks(2, refused, LAYOUTS[layout])


def look_at_state(make_strategy: Callable[[], Any]) -> None:
    """What a callback that logs the second moments does."""
    model = build("plain", blocks=1)
    run = trainer(make_strategy(), callbacks=[LooksAtState()], **SHORT)
    run.fit(model, *loaders("plain", 4, samples=16))
    run.save_checkpoint(Path(os.environ["RANKS_SCRATCH"], "looked.ckpt"))


class LooksAtState(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        (optimizer,) = trainer.optimizers
        assert all("exp_avg" in optimizer.state[p] for group in optimizer.param_groups for p in group["params"])


@sampled(1, "layout", LAYOUTS)
def test_state_lies_under_the_modules_parameters(layout: str) -> None:
    run_on_ranks(2, look_at_state, LAYOUTS[layout])


class Lookahead(optim.Optimizer):
    """Wraps another one, as libraries do: without `__init__`, and with older weights for every parameter."""

    steps_each_parameter = True

    def __init__(self, inner: optim.Optimizer, at_once: bool) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.state, self.steps = defaultdict(dict), 0
        if at_once:
            self.remember()

    def remember(self) -> None:
        for group in self.param_groups:
            for fast in group["params"]:
                if "slow" not in self.state[fast]:
                    self.state[fast]["slow"] = torch.empty_like(fast.data).copy_(fast.data)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = self.inner.step(closure)
        self.remember()
        self.steps += 1
        for group in self.param_groups if self.steps % 2 == 0 else ():
            fast = [each.data for each in group["params"]]
            slow = [self.state[each]["slow"] for each in group["params"]]
            torch._foreach_lerp_(slow[:2], fast[:2], 0.5)
            torch._foreach_copy_(fast[:2], slow[:2])
            for other, one in zip(slow[2:], fast[2:], strict=True):
                other += 0.5 * (one - other)
                one.copy_(other)
        return loss


def lookahead(parameters: Iterable[nn.Parameter], at_once: bool) -> optim.Optimizer:
    return Lookahead(optim.SGD(parameters, lr=0.1), at_once)


def looked_ahead(make_strategy: Callable[[], Any] | str, at_once: bool) -> Curve:
    model = {"optimizer": partial(lookahead, at_once=at_once), "blocks": 2}
    return train("plain", make_strategy, model=model, data={"samples": 16}, **SHORT)


@pytest.mark.parametrize("at_once", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_pipeline_steps_what_is_done_to_each_parameter_with_and_without_gradient(at_once: bool) -> None:
    one = begun_on_one(looked_ahead, "auto", at_once)
    for got in run_on_ranks(2, looked_ahead, partial(PipelineParallelStrategy, 2, microbatches=2), at_once):
        compare(one.result(), got)


def saved_blocks(strategy: Any) -> dict[str, Tensor]:
    path = Path(os.environ["RANKS_SCRATCH"], "blocks.ckpt")
    make = trainer(strategy, **SHORT)
    make.fit(build("plain", optimizer=EVERY["Blockwise"], blocks=2), *loaders("plain", 8, samples=16))
    make.save_checkpoint(path)
    (saved,) = torch.load(path, weights_only=True)["optimizer_states"]
    return {f"{number}": state["average"].values() for number, state in saved["state"].items()}


def test_a_pipeline_saves_states_that_no_message_takes() -> None:
    one = on_one(saved_blocks, DataParallelStrategy())
    for got in run_on_ranks(2, saved_blocks, PipelineParallelStrategy(microbatches=2)):
        compare_weights(one, got, 1e-4)


def test_a_pipeline_refuses_to_save_states_of_an_own_form() -> None:
    """Before the first step, where checkpoints are to be written, and not at the end of the first epoch."""
    mesh, optimizer = SimpleNamespace(sizes={"pp": 2}), MuonAndAdamW(nn.Linear(2, 2).parameters(), lr=0.1)
    assert not list(optimizer_faults([optimizer], mesh, shards=False, callbacks=[]))
    with pytest.raises(ValueError, match=r"MuonAndAdamW.state_dict writes .* inner.state = self.state\), pass enable_"):
        refuse(optimizer_faults([optimizer], mesh, shards=False, callbacks=[ModelCheckpoint()]))
