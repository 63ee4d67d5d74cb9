"""Guess the regions that tensor parallelism may shard, from names and sizes: maps into some features, and out of them.

A region is, e.g., the projections of attention, or the linear maps of a feed-forward layer. A guess changes the speed
of training, never its results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any, NamedTuple

from torch import nn

from lightning_parallel.plan.plan import ParallelPlan, starred

QUERIES_KEYS_VALUES = re.compile(r"(c_attn|qkv|qkv_proj|w_?qkv|wqkv|in_proj_qkv|to_qkv|qkv_lin|query_key_value)", re.I)
GATE_AND_UP = re.compile(r"(gate_up_proj|gate_up|w13|up_gate_proj)", re.I)
INTO_HEADS = re.compile(
    r"(q|k|v|query|key|value|queries|keys|values|[qkv]_?(proj|lin|linear|map)|w_?[qkv]|to_[qkv]"
    r"|(query|key|value)_?(proj|layer|linear)|linear_[qkv]|in_proj|fc_[qkv])",
    re.I,
)
OUT_OF_HEADS = re.compile(
    r"(o|out|output|dense|proj|projection|c_proj|w_?o|to_out|attn_out|linear_out|fc_o|(o|out|output)_?(proj|lin|linear))",
    re.I,
)
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead")
HEADS_OF_KEYS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_heads")


class LinearMap(NamedTuple):
    """A linear map: its name, and its numbers of input and output features."""

    name: str
    inputs: int
    outputs: int


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weight is [inputs, outputs], as in the Conv1D of Hugging Face's GPT-2."""
    return type(module).__name__ == "Conv1D" and "nf" in vars(module)


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of input and output features of a linear map; None for any other module."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not (isinstance(module, nn.Linear) or is_transposed(module)):
        return None
    outputs, inputs = weight.shape[::-1] if is_transposed(module) else weight.shape
    return inputs, outputs


def linear_maps(module: nn.Module) -> Iterator[LinearMap]:
    """Yield all linear maps in a module."""
    for name, child in module.named_modules():
        if (sizes := sizes_of(child)) is not None:
            yield LinearMap(name, *sizes)


def wrapped_map(module: nn.Module) -> LinearMap | None:
    """Return the linear map that a module wraps: its only linear map, or the one beside which all others are adapters.

    An adapter is a pair of maps, from the same inputs to few features, and from these features to the same outputs.
    """
    maps = list(linear_maps(module))
    for base in maps:
        others = [other for other in maps if other is not base]
        into = sorted(other.outputs for other in others if other.inputs == base.inputs)
        out = sorted(other.inputs for other in others if other.outputs == base.outputs and other.inputs in into)
        few = all(rank < min(base.inputs, base.outputs) for rank in into)
        if into == out and len(into) + len(out) == len(others) and few:
            return base
    return None


def styles_in_blocks(model: nn.Module, plan: ParallelPlan) -> dict[str, str]:
    """Return pattern -> style for modules in the plan's blocks, and in lists of layers that the plan does not name."""
    blocks = dict(plan.find_blocks(model))
    for name, module in model.named_modules():
        inside = any(other in ("", name) or name.startswith(f"{other}.") for other in blocks)
        around = any(other.startswith(f"{name}.") for other in blocks)
        one_class = len(module._modules) > 1 and len({type(child) for child in module.children()}) == 1
        if isinstance(module, nn.ModuleList) and one_class and not inside and not around:
            blocks.update((f"{name}.{index}", child) for index, child in module.named_children())
    by_block: dict[str, dict[str, str]] = {}  # block -> name inside the block -> style
    for name, block in blocks.items():
        block_styles: dict[str, str] = {}
        _visit(block, name, block_styles)
        by_block[name] = {path.removeprefix(name): style for path, style in block_styles.items()}
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    for name, block_styles in by_block.items():
        siblings = [other for other in by_block if starred(other) == starred(name)]
        for suffix, style in block_styles.items():
            is_same = all(by_block[other].get(suffix) == style for other in siblings if other + suffix in modules)
            # Indices inside a block stay: in a Sequential they are the map into a width and the map out of it.
            styles[(starred(name) if is_same else name) + suffix] = style
    return styles


def _visit(module: nn.Module, prefix: str, found: dict[str, str]) -> list[LinearMap]:
    """Add a module's styles to `found`; return the maps in no region yet: a region's other maps may be further out."""
    unassigned: list[LinearMap] = []
    for child_name, child in module.named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        sizes = sizes_of(child)
        if sizes is None and sum(sizes_of(part) is not None for part in child.modules()) > 1:
            base = wrapped_map(child)  # the map beside which adapters are
            sizes = None if base is None else base[1:]
        if isinstance(child, nn.MultiheadAttention):
            found |= {name: "colwise", f"{name}.out_proj": "rowwise"}
        elif sizes is not None:
            unassigned.append(LinearMap(name, *sizes))
        else:
            unassigned += _visit(child, name, found)
    found |= _attention(module, unassigned)
    unassigned = [linear for linear in unassigned if linear.name not in found]
    found |= _feed_forward(unassigned)
    return [linear for linear in unassigned if linear.name not in found]


def _role(name: str, pattern: re.Pattern[str]) -> bool:
    """Return whether the last component of a name that matches any role matches `pattern`."""
    for part in reversed(name.split(".")):
        hits = [role for role in (QUERIES_KEYS_VALUES, INTO_HEADS, OUT_OF_HEADS, GATE_AND_UP) if role.fullmatch(part)]
        if hits:
            return pattern in hits
    return False


# ---------------------------------------------------------------- attention


def _attention(module: nn.Module, maps: Sequence[LinearMap]) -> dict[str, str]:
    """Return the styles of the maps into heads, and of the next map, out of them; none if it is no attention."""
    into = [linear for linear in maps if _role(linear.name, QUERIES_KEYS_VALUES) or _role(linear.name, INTO_HEADS)]
    if not into:
        return {}
    last = max(maps.index(linear) for linear in into)
    after = [*maps[last + 1 :], *maps[:last]]  # some modules define the map out of heads first
    fused = max((linear.outputs for linear in into if _role(linear.name, QUERIES_KEYS_VALUES)), default=0)
    widths = {linear.outputs for linear in into}
    for out in after:
        fits = fused > out.inputs or not widths.isdisjoint((out.inputs, 3 * out.inputs))
        if fits and out not in into and _role(out.name, OUT_OF_HEADS):
            break
    else:
        return {}
    sources = {(_holder(linear), linear.inputs) for linear in into}
    beside = [linear for linear in maps if linear not in into and linear is not out and linear.outputs == out.inputs
              and (_holder(linear), linear.inputs) in sources]  # fmt: skip
    styles = {linear.name: _into_heads(linear, out.inputs, module) for linear in (*into, *beside)}
    return styles | {out.name: "rowwise"}


def _into_heads(each: LinearMap, inner: int, module: nn.Module) -> str:
    if not _role(each.name, QUERIES_KEYS_VALUES) or each.outputs <= inner or (each.outputs - inner) % 2:
        return "colwise"
    keys = (each.outputs - inner) // 2
    heads = number(module, *HEADS) or number(getattr(module, "config", None), *HEADS)
    one_key = heads is not None and keys * heads == inner
    if each.name.rpartition(".")[2] == "query_key_value" and not (one_key and heads != 1):
        return "colwise"  # the weight is ordered head by head
    unit = gcd(inner, keys)
    return f"colwise {inner // unit}:{keys // unit}:{keys // unit}"


def fused_style(name: str, config: Any) -> str | None:
    """Return the style of a fused weight of this name; None for any other weight."""
    if GATE_AND_UP.fullmatch(name):
        return "colwise 1:1"
    if not QUERIES_KEYS_VALUES.fullmatch(name) or name == "query_key_value":
        return None
    queries = number(config, *HEADS)
    keys = number(config, *HEADS_OF_KEYS) or queries
    return f"colwise {queries}:{keys}:{keys}" if queries and keys else "colwise 1:1:1"


def number(owner: Any, *names: str) -> int | None:
    """Return the first of the named attributes that is an integer; None if there is none."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if type(value) is int), None)


# ---------------------------------------------------------------- feed-forward layers


def _feed_forward(maps: Sequence[LinearMap]) -> dict[str, str]:
    """Return the styles of the maps out of a width, and of those into it: one before, and all beside that, as gates."""
    styles: dict[str, str] = {}
    roles = (INTO_HEADS, QUERIES_KEYS_VALUES)
    of_heads = {_holder(linear) for linear in maps if any(_role(linear.name, role) for role in roles)}
    rest = [linear for linear in maps if _holder(linear) not in of_heads]  # the map out of heads is further out
    for index, out in enumerate(rest):
        # maps from the outputs of `out` to its inputs; a map to twice as many features is two fused ones
        fits = [item for item in rest if item.inputs == out.outputs and item.outputs in (out.inputs, 2 * out.inputs)]
        # a square map fits any other square map, so both must be in one module
        near = [item for item in fits if _holder(item) == _holder(out) or item.inputs != item.outputs]
        into = [linear for linear in near if linear is not out and linear.name not in styles]
        if out.name not in styles and any(linear in rest[:index] for linear in into):
            beside = [linear for linear in into if linear in rest[:index] or linear.outputs != linear.inputs]
            styles |= {linear.name: "colwise" if linear.outputs == out.inputs else "colwise 1:1" for linear in beside}
            styles[out.name] = "rowwise"
    return styles


def _holder(each: LinearMap) -> str:
    return each.name.rpartition(".")[0]
