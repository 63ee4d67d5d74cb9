"""Every optimizer of torch, and users' own, step shards as one device steps whole parameters."""

import os
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

from lightning_parallel.strategies.refusals import optimizer_faults, refuse
from tests.curves import Curve, Recorder, compare, compare_weights, train
from tests.layouts import LAYOUTS
from tests.models import build, loaders
from tests.ranks import begun_on_one, on_one, run_on_ranks
from tests.tiers import sampled
from tests.trainers import trainer


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


class Counting(optim.AdamW):
    """Writes a number of its own beside the state."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps": 1}


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


class Own(optim.Optimizer):
    """Steps what is a parameter that learns, each by a rate that it knows by another of its habits."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        mine = [*parameters]
        super().__init__(mine, {"lr": 0.1})
        self.mine = mine
        self.rates = {parameter: 1 / (2 + number) for number, parameter in enumerate(mine)}
        self.by_id = {id(parameter): 1 + number / 10 for number, parameter in enumerate(mine)}
        vars(mine[0])["slow"] = True

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for parameter in self.mine:
            if isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter.grad is not None:
                rate = self.rates[parameter] * self.by_id[id(parameter)] * (0.5 if "slow" in vars(parameter) else 1.0)
                parameter.data.sub_(rate * parameter.grad / (1 + parameter.grad.norm()))
        return loss


class Flat(optim.Optimizer):
    """Steps one vector, of which it makes parameters the parts."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
        vector = nn.utils.parameters_to_vector(parameters) - 0.1 * gradient / gradient.norm()
        nn.utils.vector_to_parameters(vector, parameters)
        return loss


class Wrapping(optim.Optimizer):
    """Steps another optimizer, which has lists of parameters of its own or the same ones."""

    def __init__(self, parameters: Iterable[nn.Parameter], shares: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = optim.SGD(list(self.param_groups[0]["params"]), lr=0.1, momentum=0.9)
        if shares:
            self.inner.param_groups[0]["params"] = self.param_groups[0]["params"]

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        return self.inner.step(closure)


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


class Searching(optim.SGD):
    """Evaluates its closure again after it has moved."""

    def step(self, closure: Callable[[], Tensor]) -> Any:  # type: ignore[override]
        super().step(closure)
        return closure()


EVERY: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
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
    "Counting": partial(Counting, lr=1e-2, eps=1e-5),
    "Blockwise": partial(Blockwise, lr=0.02),
    "Own": Own,
    "Flat": Flat,
    "Wrapping": partial(Wrapping, shares=True),
}


OF_EACH_KIND = [
    *("SGD foreach", "Adam fused", "AdamW", "Adagrad", "Rprop", "Adafactor", "TensorRatio", "MuonAndAdamW"),
    *("Blockwise", "Own", "Flat", "Wrapping"),
]
SHORT = {"max_epochs": 2, "accumulate_grad_batches": 1, "gradient_clip_val": None, "limit_val_batches": 0}


def train_all(names: list[str], make_strategy: Callable[[], Any] | str = "auto", data_ranks: int = 1) -> dict[str, Any]:
    return {name: train_with(EVERY[name], make_strategy, data_ranks) for name in names}


def train_with(make_optimizer: Any, make_strategy: Callable[[], Any] | str, data_ranks: int) -> Curve:
    model = {"optimizer": make_optimizer, "blocks": 1}
    return train("plain", make_strategy, data_ranks=data_ranks, model=model, data={"samples": 16}, **SHORT)


@sampled(
    1,
    ("layout", "names"),
    [
        ("zero 1", OF_EACH_KIND),
        ("zero 3", OF_EACH_KIND),
        ("zero 2", OF_EACH_KIND),
        ("zero 2, offloaded", ["AdamW", "Own", "Flat"]),
        ("data parallel", ["AdamW", "Adafactor", "LBFGS", "LBFGS with line search", "MuonAndAdamW", "Blockwise"]),
        ("tensor parallel", ["Own", "Flat"]),
        ("zero 3", [name for name in EVERY if name not in OF_EACH_KIND and "LBFGS" not in name]),
    ],
    ids=["1", "3", "2", "2-offloaded", "data", "tensor", "3-others"],
)
def test_optimizers_train_as_on_one_device(layout: str, names: list[str]) -> None:
    ranks, readers, strategy = LAYOUTS[layout]
    one = {name: begun_on_one(train_with, EVERY[name], "auto", 1) for name in names}
    for rank, curves in enumerate(run_on_ranks(ranks, train_all, names, strategy, data_ranks=readers)):
        for name, got in curves.items():
            compare(one[name].result(), got, where=f"{name}, rank {rank}: ")


class ReadsState(Callback):
    """Reads states as a callback does that logs the second moments."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        (optimizer,) = trainer.optimizers
        assert all("exp_avg" in optimizer.state[p] for group in optimizer.param_groups for p in group["params"])


def train_on(names: list[str], first: Callable[[], Any], then: Callable[[], Any], data_ranks: int) -> dict[str, Any]:
    """Half of the training in one layout, the rest in another one."""
    return {name: halves(name, first, then, data_ranks) for name in names}


def halves(name: str, first: Callable[[], Any], then: Callable[[], Any], data_ranks: int) -> Curve:
    path = Path(os.environ["RANKS_SCRATCH"], f"{name}.ckpt")
    columns = {"optimizer": EVERY[name], "blocks": 1}
    callbacks = [ReadsState()] if name == "Adam fused" else []
    half = trainer(first(), callbacks=callbacks, **(SHORT | {"max_epochs": 1}))
    half.fit(build("plain", **columns), *loaders("plain", 8 // data_ranks, samples=16))
    half.save_checkpoint(path)
    recorder = Recorder()
    model = build("plain", seed=9, **columns)
    trainer(then(), callbacks=[recorder], **SHORT).fit(
        model, *loaders("plain", 8 // data_ranks, samples=16), ckpt_path=path, weights_only=True
    )
    recorder.curve.weights.update(model.state_dict())
    return recorder.curve


@sampled(
    1,
    ("names", "first", "then"),
    [
        (["Adam fused", "Adafactor", "MuonAndAdamW", "Blockwise", "TensorRatio"], "zero 3", "zero 1"),
        (["nesterov", "Blockwise", "TensorRatio"], "zero 2", "data parallel"),
        (["Adam fused", "Adafactor", "MuonAndAdamW", "Counting"], "zero 1", "zero 3"),
    ],
)
def test_states_continue_in_another_layout(names: list[str], first: str, then: str) -> None:
    strategies = LAYOUTS[first].strategy, LAYOUTS[then].strategy
    for rank, curves in enumerate(run_on_ranks(2, train_on, names, *strategies, data_ranks=2)):
        for name, got in curves.items():
            wanted = on_one(train_with, EVERY[name], "auto", 1)
            assert got.losses == pytest.approx(wanted.losses[2:], rel=1e-5), f"{name}, rank {rank}"
            compare_weights(wanted.weights, got.weights, 1e-4, f"{name}, rank {rank}: ")


# -------------------------------------------------------------------- which optimizers are refused


class Sparse(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.table(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


def train_refused() -> None:
    for make_optimizer, layout, said in (
        (OverAll, "pipeline", r"OverAll is not known to step each parameter .* optimizer.steps_each_parameter = True"),
        (EVERY["LBFGS"], "zero 2", r"LBFGS evaluates its closure several .* ranks hold shards"),
        (partial(Wrapping, shares=False), "zero 3", r"Wrapping.inner is a SGD with its .* use DataParallel"),
        (partial(Searching, lr=0.1), "zero 3", r"Searching evaluates its closure again within"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=said):
            train_with(make_optimizer, LAYOUTS[layout].strategy, 2)
    for layout in ("data parallel", "zero 1", "zero 2", "zero 3"):
        with pytest.raises(TypeError, match=r"sparse gradients .* use sparse=False"):
            trainer(LAYOUTS[layout].strategy(), max_steps=1).fit(Sparse(), DataLoader(torch.arange(8), 4))


def test_optimizers_that_cannot_step_shards_or_stages_are_refused() -> None:
    run_on_ranks(2, train_refused)


def test_states_of_a_form_that_a_pipeline_cannot_save_are_refused() -> None:
    """Before the first step, where checkpoints are to be written, and not at the end of the first epoch."""
    mesh, optimizer = SimpleNamespace(sizes={"pp": 2}), MuonAndAdamW(nn.Linear(2, 2).parameters(), lr=0.1)
    assert not list(optimizer_faults([optimizer], mesh, shards=False, callbacks=[]))
    with pytest.raises(ValueError, match=r"MuonAndAdamW overrides .* inner.state = self.state\), pass enable_"):
        refuse(optimizer_faults([optimizer], mesh, shards=False, callbacks=[ModelCheckpoint()]))


# -------------------------------------------------------------------- states of stages


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


def saved_blocks(make_strategy: Callable[[], Any]) -> dict[str, Tensor]:
    """States that no message takes."""
    path = Path(os.environ["RANKS_SCRATCH"], "blocks.ckpt")
    run = trainer(make_strategy(), **SHORT)
    run.fit(build("plain", optimizer=EVERY["Blockwise"], blocks=2), *loaders("plain", 8, samples=16))
    run.save_checkpoint(path)
    (saved,) = torch.load(path, weights_only=True)["optimizer_states"]
    return {f"{number}": state["average"].values() for number, state in saved["state"].items()}


def on_stages(at_once: bool) -> tuple[Curve, dict[str, Tensor]]:
    pipeline = LAYOUTS["pipeline"].strategy
    return looked_ahead(pipeline, at_once), saved_blocks(pipeline)


@pytest.mark.parametrize("at_once", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_states_of_stages_are_stepped_and_saved(at_once: bool) -> None:
    """Also of parameters without gradient."""
    one, saved = (
        begun_on_one(looked_ahead, "auto", at_once),
        begun_on_one(saved_blocks, LAYOUTS["data parallel"].strategy),
    )
    for curve, blocks in run_on_ranks(2, on_stages, at_once):
        compare(one.result(), curve)
        compare_weights(saved.result(), blocks, 1e-4)
