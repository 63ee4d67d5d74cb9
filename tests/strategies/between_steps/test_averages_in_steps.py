"""Averages and copies of weights that a step, a hook or a loss reads and changes itself, wherever they are kept."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ranks import RanksFailed, run_on_ranks
from tests.strategies.between_steps.chains import LAYOUTS, Chain, Kind, check, fit
from tests.tiers import sampled

CELLS = """
a.lerp_(p, 0.3) | a.add_(p) | a.copy_(p) | a.mul_(p)
p[0] | p[-1] | p[:, 1] | p.norm() | p - a | a - p | a.detach() + p
torch._foreach_lerp_([a], [p], 0.3) | torch._foreach_add_([a, a.clone()], [p, p], alpha=0.5)
torch._foreach_mul_([a], 0.9); torch._foreach_add_([a], [p.detach()], alpha=0.1) | a.mul_(0.9).add_(p, alpha=0.1)
a[0].copy_(p[0]) | a[:, 1] = p[:, 1] | torch.lerp(a, p, 0.3, out=a) | torch.where(a > 0, p, a) | torch.stack([a, p])
(a * p).sum() | F.mse_loss(a, p) | F.mse_loss(p, a) | a @ p.T | torch.equal(a, p) | F.cosine_similarity(a, p, dim=0)
a.data = p.data.clone() | a.addcmul_(p, p, value=0.5) | a.view(-1)[:4].add_(p.reshape(-1)[:4]) | a.sub_(p[0])
torch.add(a, p) | torch.cat([a, p]) | torch.linalg.vector_norm(a - p) | torch.dist(a, p) | p.lerp(a, 0.3)
""".replace("\n", "|").split("|")


class Slotted:
    """Holds tensors where no `vars()` finds them."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors


class Student(Chain):
    """Learns to agree with an average of its weights, which is kept as `held`, and evaluates cells of both."""

    depth, options = 2, {"max_epochs": 1}

    def __init__(self, held: str, made_in: str, cells: bool = False) -> None:
        super().__init__()
        self.held, self.made_in, self.cells, self.seen = held, made_in, cells, {}
        self.kept: Any = None
        self.teacher: Any = None
        self.make("init")

    def make(self, here: str) -> None:
        if here != self.made_in or self.kept is not None or self.teacher is not None:
            return
        teacher = copy.deepcopy(self.layers).requires_grad_(False)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(0.5)
        weights = [p.detach() for p in teacher.parameters()]
        if self.held in ("child", "data"):
            self.teacher = teacher
        else:
            held = {"hidden": [teacher], "list": weights, "slots": Slotted(weights), "closure": lambda: weights}
            self.kept = held[self.held]

    def averages(self) -> list[Tensor]:
        if self.kept is None:
            return [*self.teacher.parameters()] if self.teacher else []
        if self.held == "hidden":
            return [*self.kept[0].parameters()]
        return self.kept if self.held == "list" else self.kept.tensors if self.held == "slots" else self.kept()

    def on_train_start(self) -> None:
        self.make("on_train_start")

    def configure_optimizers(self) -> Any:
        with torch.no_grad():
            self.layers[0].up.weight.mul_(0.5)
            self.layers[1].down.weight.data[:, 1] = 0.25
        self.make("configure_optimizers")
        parameters = [*self.layers.parameters(), *self.head.parameters()]
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)

    def evaluate(self, place: str) -> None:
        named = dict(self.layers.named_parameters())
        for name in ("0.up.weight", "0.down.weight") if self.cells else ():
            average = self.averages()[list(named).index(name)]
            for cell in filter(None, map(str.strip, CELLS)):
                if self.held == "child" and cell.startswith("a.data ="):
                    continue  # no tensor hears that a plain one gets its memory; reading that raises
                names: dict[str, Any] = {"p": named[name], "a": copy.deepcopy(average.detach()), "torch": torch, "F": F}
                with torch.no_grad():
                    exec(cell if " = " in cell or ";" in cell else f"found = {cell}", names)
                found = names.get("found")
                results = [*found, names["a"]] if isinstance(found, (tuple, list)) else [found, names["a"]]
                values = [each.tolist() if isinstance(each, Tensor) else each for each in results]
                self.seen[f"{place} {self.global_step}: {cell} of {name}"] = values

    @torch.no_grad()
    def update(self) -> None:
        averages = self.averages()
        for average, weight in zip(averages, self.layers.parameters(), strict=bool(averages)):
            if self.held == "data":
                average.data = average.data * 0.7 + weight.data * 0.3
            elif self.held == "slots":
                average.mul_(0.7).add_(weight.detach(), alpha=0.3)
            else:
                average.lerp_(weight, 0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2:
            self.update()
        if self.held == "slots":
            with torch.no_grad():
                self.layers[0].up.weight.mul_(0.9)
        self.evaluate("before")
        loss = super().training_step(batch, batch_idx)
        self.evaluate("after")
        self.update()
        pairs = zip(self.layers.parameters(), self.averages(), strict=True)
        return loss + sum((p - a).square().mean() for p, a in pairs)

    def on_train_batch_end(self, *_: Any) -> None:
        self.evaluate("end")
        self.seen[f"averages {self.global_step}"] = [each.tolist() for each in self.averages()]


class Teacher(Student):
    """A copy of its layers, made in a hook or in the step, that the step runs and that follows in a hook."""

    options = {"max_epochs": 2}
    configure_optimizers = Chain.configure_optimizers

    def on_train_batch_start(self, *_: Any) -> None:
        self.make("on_train_batch_start")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.make("training_step")
        x, out = 1.5 * batch[0], self(batch[0])
        for layer in self.teacher or ():
            x = layer(x)
        loss = (out - x - 1).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.update()

    def on_train_epoch_end(self) -> None:
        self.make("on_train_epoch_end")


STUDENTS: list[Kind] = [
    *(partial(Student, held, "init") for held in ("child", "data")),
    *(partial(Student, held, "on_train_start") for held in ("hidden", "list", "slots", "closure")),
]
CHILD = partial(Student, "child", "init", True)
HIDDEN, LISTED = (partial(Student, held, "configure_optimizers", True) for held in ("hidden", "list"))
PLACES = "on_train_start", "on_train_batch_start", "on_train_epoch_end", "training_step"
TEACHERS: list[Kind] = [partial(Teacher, "child", place) for place in PLACES]
# what a step writes to gathered weights in the first batch stays, see docs/differences.md: no child beside stage 3
KINDS: dict[str, list[Kind]] = {
    "tensor x zero 3": [LISTED, *STUDENTS[3:]],
    "tensor parallel": [LISTED, CHILD],
    "tensor parallel, compiled": TEACHERS[1:3],
    "tensor x zero 2": [HIDDEN, CHILD],
    "zero 1": [CHILD, *STUDENTS, *TEACHERS],
    "data parallel": [HIDDEN, *STUDENTS],
    "zero 3": [HIDDEN, *STUDENTS, *TEACHERS],
    "zero 3, offloaded": [HIDDEN],
    "tensor x zero 3 in units": [HIDDEN, LISTED],
    "zero 3 in units": [LISTED, HIDDEN],
    "pipeline": TEACHERS[:2],  # a copy that is made later is kept from between steps
}


@sampled(2, "layout", KINDS)
def test_averages_and_weights_in_steps(layout: str) -> None:
    check(KINDS[layout], layout)


@sampled(1, "held", ["child", "closure"])
def test_averages_in_steps_of_a_pipeline_are_refused(held: str) -> None:
    student = partial(Student, held, "init" if held == "child" else "on_train_start")
    says = r"the step changes .* in place.*\(averages, noise|is in the output of the step, but another stage"
    with pytest.raises(RanksFailed, match=says):
        run_on_ranks(2, fit, student, LAYOUTS["pipeline"].strategy, 12)
