"""Expert parallel: ranks that read different samples hold different experts, and tokens travel to them.

Source: D. Lepikhin et al., GShard, ICLR 2021; S. Rajbhandari et al., DeepSpeed-MoE, ICML 2022.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial, reduce
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

from lightning_parallel.arguments import true_or_false, whole_number
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.collectives.spans import Runs
from lightning_parallel.mesh import AXES, Axis, ParallelMesh, Size, expert_sizes
from lightning_parallel.plan.experts import Experts, find_experts, listed_in
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.expert_parallel.ahead import SharedExperts
from lightning_parallel.techniques.expert_parallel.calls import Calls
from lightning_parallel.techniques.expert_parallel.capacity import Capacity
from lightning_parallel.techniques.expert_parallel.listed import ListedExperts
from lightning_parallel.techniques.expert_parallel.outside import Outside, Readers, Shown, Slot
from lightning_parallel.techniques.expert_parallel.owned import own_parameters
from lightning_parallel.techniques.expert_parallel.stacked import StackedExperts, shows_drops
from lightning_parallel.techniques.step import Step, StepFn, WrappedStep
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools.redirect import redirect_forward
from lightning_parallel.techniques.tools.shards import ElementsShard, axes_dividing, parameter_part, pieces
from lightning_parallel.techniques.tools.telling import warn

T = TypeVar("T")


@dataclass(frozen=True)
class ExpertParallel(Technique):
    """Divides the experts of a mixture over ranks that read different samples; it takes no ranks of its own.

    `HybridStrategy(Zero(4), ExpertParallel(2))` runs on 4 ranks: two copies of each expert, which ZeRO shards over the
    two ranks that hold it.

    Args:
        size: over how many ranks experts are divided; "auto" takes as many as the layout and the experts allow. Ranks
            of tensor parallel hold different experts too, beside that.
        capacity_factor: how many times its even share of tokens an expert takes; None drops nothing. A module of
            stacked experts whose class has a `drop_rate` gets it set to the share of pairs that each call dropped.
        send_once: whether a token that chose several experts of one rank is sent there once, or once for each.

    Raises:
        ValueError: a capacity below 1; or, when training starts, a size that does not fit the layout or the experts, or
            a model without experts.
    """

    size: Size = "auto"
    _: KW_ONLY
    capacity_factor: float | None = None
    send_once: bool = True

    phase: ClassVar[Phase] = Phase.PARTITION

    def __post_init__(self) -> None:
        whole_number("ExpertParallel", "size", self.size, "auto")
        true_or_false("ExpertParallel", send_once=self.send_once)
        factor = self.capacity_factor
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if factor is not None and not (number and 1 <= factor < math.inf):
            raise ValueError(
                f"ExpertParallel(capacity_factor={factor!r}): below 1 even tokens that are spread evenly would be "
                "dropped; give 1 or more, or None to drop nothing"
            )

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`: none, for experts are divided over ranks that others claim."""
        return {}

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(meets_in_forward=True, replaces_parameters=True)

    @property
    def order(self) -> tuple[int, int, str]:
        """See `Technique.order`: before tensor parallel, which leaves experts that are divided already as they are."""
        return self.phase, -len(AXES), repr(self)

    def check(self, sizes: Mapping[Axis, int]) -> None:
        """See `Technique.check`."""
        possible = expert_sizes(sizes)
        if self.size != "auto" and self.size not in possible:
            averaged = {axis: sizes[axis] for axis in ("dp_replicate", "dp_shard", "cp") if sizes[axis] > 1}
            ranks = " x ".join(f"{axis}={size}" for axis, size in averaged.items()) or "one rank"
            raise ValueError(
                f"{self!r} divides experts over ranks that read different samples, here {ranks}: size is one of "
                f"{', '.join(map(str, possible))}; choose one of these or 'auto', or give the strategy more "
                f"such ranks, as in DataParallel({self.size})"
            )

    def analyze(self, model: nn.Module, ground: PartitionContext) -> tuple[int, list[Experts]]:
        """Finds the experts, and over how many ranks they are divided."""
        experts = find_experts(model, ground.plan)
        if not experts:
            raise ValueError(_no_experts(self, model, ground.plan.source))
        _require_untied(model, experts, ground.mesh)
        return self._size(experts, ground.mesh), experts

    def _size(self, experts: Sequence[Experts], mesh: ParallelMesh) -> int:
        tensor = mesh.sizes["tp"]
        common = reduce(math.gcd, (each.count for each in experts))
        fitting = [size for size in expert_sizes(mesh.sizes) if common % (size * tensor) == 0]
        if self.size == "auto" and fitting:
            if fitting[-1] == 1 < expert_sizes(mesh.sizes)[-1]:
                warn(_not_divided(self, experts))
            return fitting[-1]
        if self.size in fitting:
            assert isinstance(self.size, int)
            return self.size
        odd = next(each for each in experts if each.count % ((1 if self.size == "auto" else self.size) * tensor))
        joined = f" x {tensor} of tensor parallel" if tensor > 1 else ""
        raise ValueError(
            f"{self!r}: the {odd.count} experts of {odd.name} do not divide over {self.size} ranks{joined}; "
            f"choose {_or(fitting) or 'a smaller tensor parallel'}"
        )

    def divide(self, model: nn.Module, ground: PartitionContext, seen: tuple[int, list[Experts]]) -> Division:
        """Keeps this rank's experts, and leads calls of them over the ranks."""
        (size, experts), mesh = seen, ground.mesh
        view = mesh.experts(size)
        if view["ep"].size() == 1 and self.capacity_factor is None:
            return Division(model)
        if self.capacity_factor is not None and mesh.sizes["cp"] > 1:
            warn(_another_order(self))
        # as the whole model tells: a stage of a pipeline may have one weight of them, where its loss reads it
        found = [each for each in experts if any(True for _ in model.get_submodule(each.name).parameters())]
        division = _Dividing(view, mesh, self, own_parameters(model, found))
        for each in found:
            division.divide(model, each)
        limited = [] if self.capacity_factor is None else [model.get_submodule(each.name) for each in found]
        showing = [module for module in limited if shows_drops(module)]
        return DividedExperts(model, division.calls, mesh.device, division.shared, showing, division.shown())


@dataclass(eq=False)
class DividedExperts(Division):
    """A model of whose experts each rank has some.

    Attributes:
        calls: of experts on all ranks.
        device: of this rank.
        shared: what is computed while tokens travel.
        showing: the modules that show what they dropped.
        shown: shows weights of experts to code outside of them.
    """

    calls: Calls
    device: torch.device
    shared: Sequence[SharedExperts]
    showing: Sequence[nn.Module]
    shown: Shown

    def outputs(self, outputs: Any) -> Any:
        """Makes whole what ranks have parts of."""
        return tree_map_only(Outside, Outside.whole, outputs)

    def run(self, run: StepFn[T]) -> StepFn[T]:
        """Shows the user's own code all experts; tells other ranks that a step calls no more of them."""

        def ending(*args: Any, **kwargs: Any) -> T:
            with self.shown():
                result = run(*args, **kwargs)
            self.calls.end(self.device)
            return result

        return ending

    def show(self) -> None:
        """See `Division.show`."""
        self.shown.show()

    def step(self, step: Step) -> Step:
        """Tells shared experts when a batch begins, and leaves nothing behind."""
        return ExpertsStep(step, self)


class ExpertsStep(WrappedStep):
    """A step that tells shared experts when a batch begins, and leaves no rate of what was dropped behind."""

    def __init__(self, inner: Step, division: DividedExperts) -> None:
        super().__init__(inner)
        self._division = division

    def forward(self, run: StepFn[T], *args: Any, **kwargs: Any) -> T:
        """See `Step.forward`."""
        for each in self._division.shared:
            each.adopt()
        return self.inner.forward(run, *args, **kwargs)

    def backward(self, run: Callable[[], None]) -> None:
        """See `Step.backward`."""
        with self._division.shown():  # for what is computed again
            self.inner.backward(run)

    def close(self) -> None:
        """See `Step.close`."""
        for module in self._division.showing:
            vars(module).pop("drop_rate", None)
        self.inner.close()


class _Dividing:
    """Divides modules of experts.

    Args:
        view: see `ParallelMesh.experts`.
        mesh: all ranks.
        technique: the user's wishes.
        own: the parameters that are divided.
    """

    def __init__(
        self, view: DeviceMesh, mesh: ParallelMesh, technique: ExpertParallel, own: Iterable[nn.Parameter]
    ) -> None:
        copies = [name for name in ("ep_replicate", "ep_shard") if view[name].size() > 1] or ["ep_shard"]
        self._kept = view[(*copies, "ep")]
        self._copied = [Replicate()] * len(copies)
        self._experts, self._technique = view["ep"], technique
        self._alike = Ranks(mesh["tp"].get_group(), "tp") if mesh.sizes["tp"] > 1 else None
        self._mesh, self.shared = mesh, list[SharedExperts]()
        self.calls = Calls(view["ep"].get_group())
        self._own, self._parts = set(own), dict[nn.Parameter, nn.Parameter]()
        self._ranks, self._slots = Ranks(view["ep"].get_group(), "ep"), list[Slot]()

    def shown(self) -> Shown:
        """What shows the parameters that are divided."""
        number = self.calls.number("weights of experts outside of their module")
        return Shown(self._slots, Readers(self._ranks, self._mesh.sizes["tp"], self.calls, number))

    def divide(self, model: nn.Module, experts: Experts) -> None:
        """Keeps this rank's experts of one module, and leads calls of them over the ranks."""
        module = model.get_submodule(experts.name)
        if experts.form == "stacked":
            self._divide_stacked(experts, module, model)
        else:
            self._divide_listed(experts, module, model)

    def _divide_stacked(self, experts: Experts, module: nn.Module, model: nn.Module) -> None:
        self._keep_parts(module, 2, lambda _: Shard(0))
        self.shared.append(shared := SharedExperts(model.get_submodule(experts.name.rpartition(".")[0]), module))
        divided, whole = (self._capacity(self._mesh.tokens(cp)) for cp in (True, False))
        once = self._technique.send_once
        stacked = StackedExperts(
            experts.name, module, experts.count, self.calls, self._alike, divided, whole, once, shared.compute
        )
        redirect_forward(module, stacked.wrap)

    def _divide_listed(self, experts: Experts, module: nn.Module, model: nn.Module) -> None:
        members, ranks = listed_in(module), self._experts.size()
        skeleton = _on_meta(members[0])
        for number, member in enumerate(members):
            holder = number * ranks // len(members)
            for part in member.modules():
                self._keep_parts(part, 1, partial(_of_one_rank, holder, ranks))
        capacity = self._capacity(self._mesh.data)  # to the others of a batch a list shows the same tokens
        listed = ListedExperts(experts.name, members, skeleton, self.calls, self._alike, capacity)
        for member in members:
            redirect_forward(member, listed.guard)
        for owner in _callers(model, module):
            redirect_forward(owner, partial(listed.lead, owner))

    def _capacity(self, ranks: DeviceMesh) -> Capacity:
        return Capacity(self._technique.capacity_factor, ranks.get_group())

    def _keep_parts(self, module: nn.Module, dims: int, place: Callable[[nn.Parameter], Placement]) -> None:
        """Replaces those of a module's own parameters that are divided, and have so many dimensions; tied stay tied."""
        for name, parameter in module._parameters.items():
            if parameter in self._own and parameter.dim() >= dims:
                if parameter not in self._parts:
                    self._parts[parameter] = parameter_part(parameter, self._kept, [*self._copied, place(parameter)])
                module._parameters[name] = part = self._parts[parameter]
                runs = [
                    pieces(place(parameter), len(parameter), self._ranks.count, rank)
                    for rank in range(self._ranks.count)
                ]
                elements = self._ranks.elements(len(parameter), runs)
                self._slots.append(Slot(module._parameters, name, elements, axes_dividing(part)))


def _of_one_rank(holder: int, ranks: int, parameter: nn.Parameter) -> Placement:
    """All rows are on one rank."""
    rows: list[Runs] = [((0, len(parameter)),) if rank == holder else () for rank in range(ranks)]
    return ElementsShard(0, rows)


def _require_untied(model: nn.Module, found: Sequence[Experts], mesh: ParallelMesh) -> None:
    own = own_parameters(model, found)
    for each in found if mesh.sizes["tp"] > 1 else ():
        for name, parameter in model.get_submodule(each.name).named_parameters():
            if parameter.dim() > 1 and parameter not in own:
                raise ValueError(
                    f"{each.name}.{name} is shared by several experts, or by an expert and another module, so every "
                    "rank keeps it whole, but tensor parallel might divide it; untie it, or leave tensor parallel out"
                )


def _callers(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """A list that has a forward, else the nearest modules with one around each place where it stands."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    around = [part for part in model.modules() if any(child is module for child in part.children())]
    return list(dict.fromkeys(caller for part in around for caller in _callers(model, part)))


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy without memory."""
    tensors = {id(each): torch.empty_like(each, device="meta") for each in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, dict(tensors))


def _or(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


def _not_divided(technique: ExpertParallel, experts: Sequence[Experts]) -> str:
    counts = ", ".join(f"{each.count} of {each.name}" for each in experts)
    return (
        f"{technique!r} divides no experts over ranks that read different samples, for no number of these divides "
        f"{counts}; choose another number of experts or of ranks, or leave it out"
    )


def _no_experts(technique: ExpertParallel, model: nn.Module, source: str) -> str:
    return (
        f"{technique!r} finds no experts in {type(model).__name__}: {source} names none, and no module has the form of "
        "stacked experts, called with (tokens, indices, weights), or of a list of experts beside a router. Name them, "
        "as in plan=ParallelPlan(blocks='net.layers.*', experts='net.layers.*.experts'), or leave ExpertParallel out"
    )


def _another_order(technique: ExpertParallel) -> str:
    return (
        f"{technique!r} drops tokens in the order of ranks, which have parts of each sequence beside context parallel: "
        "where an expert is full, other tokens are dropped than on one device; leave capacity_factor out for its curve"
    )
