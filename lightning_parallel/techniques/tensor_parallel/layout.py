"""Which parameters of a model are divided, how, and the sizes that allow it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_parallel.plan.plan import matching
from lightning_parallel.techniques.tools.shards import PartsShard, as_shard, dtensor_of, shard_of

HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size", "d_head", "d_kv", "dim_head", "head_width")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_head")


@dataclass(frozen=True)
class Style:
    """How a module is divided.

    Args:
        kind: colwise, rowwise, colwise_gather_output, rowwise_split_input or vocabulary.
        ratio: of a fused colwise module, how its parts relate: (4, 2, 2) for four query and two key and value heads.
    """

    kind: str
    ratio: tuple[int, ...] = (1,)

    KINDS: ClassVar = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "vocabulary")

    @property
    def told(self) -> str:
        """As it is written in a plan."""
        return f"{self.kind} {':'.join(map(str, self.ratio))}" if len(self.ratio) > 1 else self.kind

    @classmethod
    def parse(cls, text: str) -> Style:
        """Reads "colwise", "rowwise", ... and "colwise 4:2:2".

        Raises:
            ValueError: an unknown style.
        """
        kind, _, ratio = text.partition(" ")
        if kind not in cls.KINDS or (ratio and (kind != "colwise" or not re.fullmatch(r"\d+(:\d+)*", ratio))):
            raise ValueError(
                f"the tensor style {text!r} is none of {', '.join(cls.KINDS)} or 'colwise 2:1:1' for a fused weight "
                "whose parts have sizes in this ratio"
            )
        return cls(kind, tuple(map(int, ratio.split(":"))) if ratio else (1,))


@dataclass(frozen=True)
class DividedModule:
    """A module and how it is divided.

    Args:
        name: its FQN.
        module: nn.Linear or one like it, Conv1D of Hugging Face, or nn.Embedding.
        style: how.
        features: how many features (output of colwise, input of rowwise, ids of a vocabulary) are divided.
        head: width of an attention head where the features are heads, else 1.
    """

    name: str
    module: nn.Module
    style: Style
    features: int
    head: int = 1

    def on(self, module: nn.Module) -> DividedModule:
        """The same for a copy of the module."""
        return replace(self, module=module)

    @property
    def dim(self) -> int:
        """The dimension of the weight that is divided."""
        return _dim(self.module, self.style)

    @property
    def parts(self) -> tuple[int, ...]:
        """The sizes of what lies one after the other in the divided dimension."""
        unit = self.features // sum(self.style.ratio)
        return tuple(unit * share for share in self.style.ratio)

    def placements(self) -> dict[str, Placement]:
        """How each parameter lies on the axis tp; those of a rowwise module that see the sum are whole."""
        weight = self._place(self.dim)
        bias = Replicate() if self.style.kind.startswith("rowwise") else self._place(0)
        return {"weight": weight, "bias": bias}

    def _place(self, dim: int) -> Placement:
        return Shard(dim) if len(self.style.ratio) == 1 else PartsShard(dim, self.parts)

    def check(self, ranks: int) -> None:
        """Raises ValueError unless the sizes can be divided."""
        if self.features % sum(self.style.ratio):
            raise ValueError(
                f"{self.name} has {self.features} features, which are no parts in the ratio "
                f"{':'.join(map(str, self.style.ratio))}; correct its style in the plan"
            )
        for part in self.parts:
            if self.head > 1 and part // self.head % ranks:
                raise ValueError(_wrong_size(self.name, part // self.head, "heads", ranks))
            if len(self.parts) > 1 and part % ranks:
                raise ValueError(_wrong_size(self.name, part, "features in each of its parts", ranks))


def _wrong_size(name: str, size: int, what: str, ranks: int) -> str:
    below, above = size // ranks * ranks, (size // ranks + 1) * ranks
    near = f"{below} or {above}" if below else f"{above}"
    fitting = [n for n in range(1, size + 1) if size % n == 0]
    return (
        f"{name} has {size} {what}, which {ranks} ranks cannot share evenly; choose {near} of them, "
        f"or a tensor-parallel size among {fitting}"
    )


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as in the Conv1D of Hugging Face's GPT-2."""
    return type(module).__name__ == "Conv1D" and "nf" in vars(module)


def _dim(module: nn.Module, style: Style) -> int:
    return int(style.kind.startswith("rowwise") != is_transposed(module))


def find_divided(model: nn.Module, styles: Mapping[str, str]) -> list[DividedModule]:
    """The modules that the styles name; a stage of a pipeline may have none of them.

    Raises:
        ValueError: a style that is unknown, or a module that is no linear map or embedding.
    """
    named: dict[str, DividedModule] = {}
    for pattern, text in styles.items():
        style = Style.parse(text)
        for name, module in matching(model, pattern):
            if any(True for _ in module.parameters(recurse=False)):  # stand-ins of other stages have none
                weight = _require_weight(name, module, text)
                named[name] = DividedModule(name, module, style, weight.shape[_dim(module, style)])
    return [replace(each, head=_head_width(model, each, named.values())) for each in named.values()]


def _require_weight(name: str, module: nn.Module, style: str) -> Tensor:
    weight = module._parameters.get("weight")
    names = [own for own, _ in module.named_parameters(recurse=False)]
    if weight is None or weight.dim() != 2 or set(names) - {"weight", "bias"}:
        raise ValueError(
            f"{name} is to be divided {style}, but a {type(module).__name__} with the parameters {names} is no linear "
            "map or embedding; leave it out of the plan's styles, and every rank computes it"
        )
    return weight


def parent_of(name: str) -> str:
    """The FQN of the module that holds this one."""
    return name.rpartition(".")[0]


def _head_width(model: nn.Module, each: DividedModule, all_: Iterable[DividedModule]) -> int:
    """The width of a head, where the module is a projection of attention: its parent knows heads.

    A parent that holds more than one region does not say which of them its heads are in.
    """
    siblings = [other for other in all_ if parent_of(other.name) == parent_of(each.name)]
    inner = [other.features for other in siblings if other.style.kind == "rowwise"]
    if each.style.kind not in ("colwise", "rowwise") or len(inner) != 1:
        return 1
    parent = model.get_submodule(parent_of(each.name))
    for width in _numbers(parent, HEAD_WIDTHS):
        return width
    return next((inner[0] // count for count in _numbers(parent, HEAD_COUNTS) if inner[0] % count == 0), 1)


def _numbers(module: nn.Module, names: tuple[str, ...]) -> Iterator[int]:
    for name in names:
        value = vars(module).get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield value


def divide_parameters(model: nn.Module, divided: list[DividedModule], mesh: DeviceMesh) -> None:
    """Replaces every parameter that is divided by this rank's part, as a DTensor; tied ones stay tied."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append((module, name))
    made: dict[int, nn.Parameter] = {}
    for each in divided:
        for name, placement in each.placements().items():
            parameter = each.module._parameters.get(name)
            if parameter is None or placement.is_replicate():
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _divided(parameter, mesh, placement)
                made[id(made[id(parameter)])] = made[id(parameter)]
                for module, own in owners[id(parameter)]:  # some only hold it, as that of a bias in two places
                    module._parameters[own] = made[id(parameter)]


def _divided(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    whole = parameter.detach()
    device = whole.device if whole.is_meta else torch.device(mesh.device_type)
    like = dtensor_of(whole.new_empty(0, device=device), mesh, [placement], whole.shape, whole.stride())
    part = shard_of(whole, like).to_local()
    part = part.clone() if not part.is_meta else part  # a view would keep the whole in memory
    made = nn.Parameter(as_shard(part, like), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made
