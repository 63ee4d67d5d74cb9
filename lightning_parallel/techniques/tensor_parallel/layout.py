"""Which modules tensor parallelism shards, along which dimension, and which features each rank gets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_parallel.collectives.spans import Runs, Span, balanced, bounds, joined
from lightning_parallel.plan.plan import matching
from lightning_parallel.plan.regions import HEADS, HEADS_OF_KEYS, is_transposed, linear_maps, wrapped_map
from lightning_parallel.techniques.tools.shards import placement_of, sharded_parameter

# ---------------------------------------------------------------- which heads each rank gets

# Ranks share out groups: a key and value head, with the query heads that attend to it. With fewer groups than
# ranks, query heads are sharded, and the projections of keys and values are replicated: of 8 query heads and 2 key
# heads, rank 1 of 4 computes query heads 2 and 3, and both key heads.

QUERY_HEAD_COUNTS = (*HEADS, "heads", "num_head", "attention_heads")
HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size", "d_head", "d_kv", "dim_head", "head_width", "d_k")
KEY_HEAD_COUNTS = (*HEADS_OF_KEYS, "n_head_kv", "n_local_kv_heads")
QUERY_HEADS_PER_KEY_HEAD = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
"""Names of attributes of attention modules: query heads; features of a head; key heads; query heads per key head."""


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module.

    Args:
        count: number of query heads.
        width: features per head, at the input of the output projection.
        groups: number of groups of query heads with the same keys and values.
    """

    count: int
    width: int
    groups: int

    def runs(self, size: int, ranks: int) -> list[Runs]:
        """Return the features of each rank, of `size` that lie head by head: of queries, of keys, or fused per head."""
        by_groups = self.groups >= ranks and size % self.groups == 0
        if not by_groups and not self._are_queries(size):
            return [joined([bounds(size, ranks, rank)]) for rank in range(ranks)]
        units = self.groups if by_groups else self.count
        return [joined([(a * (size // units), b * (size // units))]) for a, b in balanced(units, ranks)]

    def stay_replicated(self, size: int, ranks: int) -> bool:
        """Whether these features are replicated: keys or values with fewer heads than ranks."""
        keys, rest = divmod(size, self.width)
        return self.groups < ranks and not self._are_queries(size) and keys > 0 and not rest and self.count % keys == 0

    def _are_queries(self, size: int) -> bool:
        return size % self.count == 0 and size >= self.count * self.width


def _numbers(owners: Iterable[nn.Module], names: tuple[str, ...]) -> Iterator[int]:
    for owner in owners:
        for name in names:
            value = vars(owner).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                yield value


# ---------------------------------------------------------------- which modules are sharded, and how


@dataclass(frozen=True)
class Style:
    """How a module is sharded.

    Args:
        kind: colwise, rowwise, colwise_gather_output, rowwise_split_input or vocabulary.
        ratio: ratio of the parts of a fused colwise module: (4, 2, 2) for four query and two key and value heads.
    """

    kind: str
    ratio: tuple[int, ...] = (1,)

    KINDS: ClassVar = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "vocabulary")

    @classmethod
    def parse(cls, text: str) -> Style:
        """Parse "colwise", "rowwise", ... or "colwise 4:2:2".

        Raises:
            ValueError: an unknown style.
        """
        kind, _, ratio = text.partition(" ")
        if kind not in cls.KINDS or (ratio and (kind != "colwise" or not re.fullmatch(r"\d+(:\d+)*", ratio))):
            raise ValueError(
                f"the tensor style {text!r} is none of {', '.join(cls.KINDS)} or 'colwise 2:1:1' for a fused weight "
                "with parts in this ratio"
            )
        return cls(kind, tuple(map(int, ratio.split(":"))) if ratio else (1,))


@dataclass(frozen=True)
class DividedModule:
    """A module and how it is sharded.

    Args:
        name: FQN of the module.
        module: nn.Linear or one like it, Conv1D of Hugging Face, nn.Embedding, or nn.MultiheadAttention.
        style: how it is sharded.
        features: size of the sharded dimension: outputs (colwise), inputs (rowwise) or token ids (vocabulary).
        heads: the heads of the attention of which the module is a projection; None if it is none, or heads are unknown.
    """

    name: str
    module: nn.Module
    style: Style
    features: int
    heads: Heads | None = None

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of the fused parts that follow each other in the sharded dimension, e.g. of queries, keys, values."""
        unit = self.features // sum(self.style.ratio)
        return tuple(unit * share for share in self.style.ratio)

    def parameters(self) -> dict[str, int]:
        """Return the sharded dimension of each sharded parameter. The bias of rowwise, added to the sum, is full."""
        if isinstance(self.module, nn.MultiheadAttention):
            names = [name for name in self.module._parameters if name.startswith("in_proj") or "_proj_" in name]
            return dict.fromkeys(names, 0)
        rows = self.style.kind.startswith("rowwise")
        bias = {} if rows else {"bias": 0}
        return {"weight": int(rows != is_transposed(self.module)), **bias}

    def placement(self, dim: int, size: int, ranks: int) -> Placement:
        """Return the placement on `tp` of a parameter with this size in the sharded dimension `dim`."""
        runs: list[list[Span]] = [[] for _ in range(ranks)]
        start = 0
        for part in self.parts if size == self.features else (size,):
            chunks = [joined([bounds(part, ranks, rank)]) for rank in range(ranks)]
            part_runs = chunks if self.heads is None else self.heads.runs(part, ranks)
            for rank_runs, spans in zip(runs, part_runs, strict=True):
                rank_runs += [(start + a, start + b) for a, b in spans]
            start += part
        return placement_of(dim, size, [joined(rank_runs) for rank_runs in runs])


def find_divided(model: nn.Module, styles: Mapping[str, str], given: bool = True) -> list[DividedModule]:
    """Return the modules of the full model that the styles name.

    Args:
        model: the full model.
        styles: style of the modules that match each pattern.
        given: whether the user gave the styles. Those of a model's metadata may name modules that were wrapped since.

    Raises:
        ValueError: an unknown style, or one that the user gave for a module that is no linear map or embedding.
    """
    named: dict[str, DividedModule] = {}
    for pattern, text in styles.items():
        style = Style.parse(text)
        rows = style.kind.startswith("rowwise")
        for name, module in matching(model, pattern):
            if not is_undivided(module):
                continue
            weight = module._parameters.get("weight")
            if isinstance(module, nn.MultiheadAttention) and style.kind == "colwise":
                named[name] = DividedModule(name, module, Style("colwise", (1, 1, 1)), 3 * module.embed_dim)
            elif weight is not None and weight.dim() == 2:
                named[name] = DividedModule(name, module, style, weight.shape[int(rows != is_transposed(module))])
            elif (base := wrapped_map(module)) is not None:
                # A wrapped linear map with adapters: shard the map and the half of each adapter with these features.
                features = base.inputs if rows else base.outputs
                for linear in linear_maps(module):
                    if linear.name == base.name or features == (linear.inputs if rows else linear.outputs):
                        path = f"{name}.{linear.name}"
                        named[path] = DividedModule(path, module.get_submodule(linear.name), style, features)
            elif given:
                names = [key for key, _ in module.named_parameters(recurse=False)]
                ratio = f" {':'.join(map(str, style.ratio))}" if len(style.ratio) > 1 else ""
                raise ValueError(
                    f"{name} cannot be divided {style.kind}{ratio}: a {type(module).__name__} with the parameters "
                    f"{names} is no linear layer or embedding; leave it out of the plan's styles, and every rank "
                    "computes it"
                )
    heads = _find_heads(model, named)
    return [replace(each, heads=heads.get(each.name)) for each in named.values()]


def is_undivided(module: nn.Module) -> bool:
    """Whether the module has parameters, and neither another technique nor the user has sharded one."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(isinstance(parameter, DTensor) for parameter in parameters)


# ---------------------------------------------------------------- heads


def _find_heads(model: nn.Module, divided: Mapping[str, DividedModule]) -> dict[str, Heads]:
    """Return the heads of each projection of an attention, read from attributes of the modules that contain it."""
    heads_by_name: dict[str, Heads] = {}
    for within, region in _regions(model, divided):
        inner = {each.features for each in region if each.style.kind.startswith("rowwise")}
        into = [each for each in region if each.style.kind.startswith("colwise")]
        # For each projection, the modules that contain it, from the innermost to the one that contains the region.
        paths, least = [each.name.split(".") for each in into], within.count(".") + 1
        owners = [model.get_submodule(".".join(path[:k])) for path in paths for k in range(len(path), least - 1, -1)]
        features = min(inner)
        count = next((n for n in _numbers(owners, QUERY_HEAD_COUNTS) if features % n == 0), None)
        count = count or next((features // n for n in _numbers(owners, HEAD_WIDTHS) if features % n == 0), None)
        if len(inner) > 1 or count is None:
            continue
        width, parts = features // count, [part for each in into for part in each.parts]
        keys = [size // width for size in parts if size < features and size % width == 0]
        keys += list(_numbers(owners, KEY_HEAD_COUNTS))[:1]
        keys += [count // n for n in _numbers(owners, QUERY_HEADS_PER_KEY_HEAD) if count % n == 0][:1]
        heads = Heads(count, width, gcd(count, *keys))
        heads_by_name.update((each.name, heads) for each in region)
    return heads_by_name


def _regions(model: nn.Module, divided: Mapping[str, DividedModule]) -> Iterator[tuple[str, list[DividedModule]]]:
    """Yield each region: colwise modules with the rowwise ones that follow, and the smallest module that holds them.

    Regions in one module, such as attention and MLP of a block, are told apart by the order of its submodules.
    """
    order = [name for name, _ in model.named_modules() if name in divided]
    ungrouped = {name: divided[name] for name in order if divided[name].style.kind != "vocabulary"}
    holders = {".".join(name.split(".")[:k]) for name in ungrouped for k in range(1, name.count(".") + 2)}
    for within in sorted(holders, key=lambda name: (-name.count("."), name)):
        inside = [each for name, each in ungrouped.items() if name == within or name.startswith(f"{within}.")]
        into: list[DividedModule] = []
        regions: list[list[DividedModule]] = []
        for each in inside:
            if each.style.kind.startswith("colwise"):
                into.append(each)
            elif into:
                regions.append([*into, each])
                into = []
            elif regions and regions[-1][-1].features == each.features:
                regions[-1].append(each)
        for region in regions:
            for each in region:
                del ungrouped[each.name]
            yield within, region


# ---------------------------------------------------------------- parameters


def divide_parameters(model: nn.Module, divided: list[DividedModule], mesh: DeviceMesh) -> None:
    """Replace every sharded parameter by this rank's shard, a DTensor on `mesh`. Tied parameters stay tied."""
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            slots.setdefault(id(parameter), []).append((module, name))
    for each in divided:
        for name, dim in each.parameters().items():
            parameter = each.module._parameters.get(name)
            if parameter is None or isinstance(parameter, DTensor):  # a tied one, which has its shard already
                continue
            placement = each.placement(dim, parameter.shape[dim], mesh.size())
            shard = sharded_parameter(parameter, mesh, [placement])
            for module, key in slots[id(parameter)]:  # also where it has no style, as a shared bias
                module._parameters[key] = shard
