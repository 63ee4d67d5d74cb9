"""Regions that tensor parallelism may divide, guessed from names and sizes: maps into some features, and out of them.

A guess decides how fast training is, never what comes out.
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
    """A linear map: its name, and how many features go in and come out."""

    name: str
    inputs: int
    outputs: int


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as in the Conv1D of Hugging Face's GPT-2."""
    return type(module).__name__ == "Conv1D" and "nf" in vars(module)


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """How many features go into a linear map and come out; None for any other module."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not (isinstance(module, nn.Linear) or is_transposed(module)):
        return None
    outputs, inputs = weight.shape[::-1] if is_transposed(module) else weight.shape
    return inputs, outputs


def linear_maps(module: nn.Module) -> Iterator[LinearMap]:
    """All linear maps in a module, by name."""
    for name, part in module.named_modules():
        if (sizes := sizes_of(part)) is not None:
            yield LinearMap(name, *sizes)


def wrapped_map(module: nn.Module) -> LinearMap | None:
    """The linear map in a module that is one itself for its callers: the only one, or one with adapters of low rank.

    An adapter is a pair of maps, from the same inputs to few features and from those to the same outputs.
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
    """Return the styles of modules in the plan's blocks, and in lists of layers that it does not name, by pattern."""
    blocks = dict(plan.find_blocks(model))
    for name, part in model.named_modules():
        inside = any(own in ("", name) or name.startswith(f"{own}.") for own in blocks)
        around = any(own.startswith(f"{name}.") for own in blocks)
        one_class = len(part._modules) > 1 and len({type(child) for child in part.children()}) == 1
        if isinstance(part, nn.ModuleList) and one_class and not inside and not around:
            blocks.update((f"{name}.{own}", child) for own, child in part.named_children())
    found: dict[str, dict[str, str]] = {}  # of each block, by what names have beyond its own
    for name, block in blocks.items():
        own: dict[str, str] = {}
        _visit(block, name, own)
        found[name] = {each.removeprefix(name): style for each, style in own.items()}
    modules = dict(model.named_modules())
    styles: dict[str, str] = {}
    for name, own in found.items():
        kin = [other for other in found if starred(other) == starred(name)]
        for each, style in own.items():
            alike = all(found[other].get(each) == style for other in kin if other + each in modules)
            # Within a block numbers stay: in a Sequential they are the way in and the way out.
            styles[(starred(name) if alike else name) + each] = style
    return styles


def _visit(module: nn.Module, prefix: str, found: dict[str, str]) -> list[LinearMap]:
    """Finds the regions in a module, and returns the maps in it that belong to none yet: parts may lie further out."""
    left: list[LinearMap] = []
    for own, child in module.named_children():
        name = f"{prefix}.{own}" if prefix else own
        sizes = sizes_of(child)
        if sizes is None and sum(sizes_of(part) is not None for part in child.modules()) > 1:
            base = wrapped_map(child)  # a map that has adapters beside it
            sizes = None if base is None else base[1:]
        if isinstance(child, nn.MultiheadAttention):
            found |= {name: "colwise", f"{name}.out_proj": "rowwise"}
        elif sizes is not None:
            left.append(LinearMap(name, *sizes))
        else:
            left += _visit(child, name, found)
    found |= _attention(module, left)
    left = [each for each in left if each.name not in found]
    found |= _feed_forward(left)
    return [each for each in left if each.name not in found]


def _role(name: str, pattern: re.Pattern[str]) -> bool:
    """Whether the last component of a name that says anything says this."""
    for part in reversed(name.split(".")):
        roles = [each for each in (QUERIES_KEYS_VALUES, INTO_HEADS, OUT_OF_HEADS, GATE_AND_UP) if each.fullmatch(part)]
        if roles:
            return pattern in roles
    return False


# ---------------------------------------------------------------- attention


def _attention(module: nn.Module, maps: Sequence[LinearMap]) -> dict[str, str]:
    """The maps into heads, and the next one out of them."""
    into = [each for each in maps if _role(each.name, QUERIES_KEYS_VALUES) or _role(each.name, INTO_HEADS)]
    if not into:
        return {}
    last = max(maps.index(each) for each in into)
    after = [*maps[last + 1 :], *maps[:last]]  # some list the way out first
    fused = max((each.outputs for each in into if _role(each.name, QUERIES_KEYS_VALUES)), default=0)
    widths = {each.outputs for each in into}
    for out in after:
        fits = fused > out.inputs or not widths.isdisjoint((out.inputs, 3 * out.inputs))
        if fits and out not in into and _role(out.name, OUT_OF_HEADS):
            break
    else:
        return {}
    alike = {(_holder(each), each.inputs) for each in into}
    beside = [each for each in maps if each not in into and each is not out and each.outputs == out.inputs
              and (_holder(each), each.inputs) in alike]  # fmt: skip
    styles = {each.name: _into_heads(each, out.inputs, module) for each in (*into, *beside)}
    return styles | {out.name: "rowwise"}


def _into_heads(each: LinearMap, inner: int, module: nn.Module) -> str:
    if not _role(each.name, QUERIES_KEYS_VALUES) or each.outputs <= inner or (each.outputs - inner) % 2:
        return "colwise"
    keys = (each.outputs - inner) // 2
    heads = number(module, *HEADS) or number(getattr(module, "config", None), *HEADS)
    one_key = heads is not None and keys * heads == inner
    if each.name.rpartition(".")[2] == "query_key_value" and not (one_key and heads != 1):
        return "colwise"  # head by head
    unit = gcd(inner, keys)
    return f"colwise {inner // unit}:{keys // unit}:{keys // unit}"


def fused_style(name: str, config: Any) -> str | None:
    """The style of a fused weight of this name, None for any other."""
    if GATE_AND_UP.fullmatch(name):
        return "colwise 1:1"
    if not QUERIES_KEYS_VALUES.fullmatch(name) or name == "query_key_value":
        return None
    queries = number(config, *HEADS)
    keys = number(config, *HEADS_OF_KEYS) or queries
    return f"colwise {queries}:{keys}:{keys}" if queries and keys else "colwise 1:1:1"


def number(owner: Any, *names: str) -> int | None:
    """The first of these attributes that is a number."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if type(value) is int), None)


# ---------------------------------------------------------------- feed-forward layers


def _feed_forward(maps: Sequence[LinearMap]) -> dict[str, str]:
    """Find the maps out of a width, and those into it: one before, and all that are beside it, as gates."""
    styles: dict[str, str] = {}
    roles = (INTO_HEADS, QUERIES_KEYS_VALUES)
    of_heads = {_holder(each) for each in maps if any(_role(each.name, role) for role in roles)}
    left = [each for each in maps if _holder(each) not in of_heads]  # the way out of heads lies further out
    for number, out in enumerate(left):
        # those that lead into the width from which it leads back; two into it are fused
        fits = [it for it in left if it.inputs == out.outputs and it.outputs in (out.inputs, 2 * out.inputs)]
        # square maps lead from anywhere to anywhere
        near = [it for it in fits if _holder(it) == _holder(out) or it.inputs != it.outputs]
        into = [each for each in near if each is not out and each.name not in styles]
        if out.name not in styles and any(each in left[:number] for each in into):
            beside = [each for each in into if each in left[:number] or each.outputs != each.inputs]
            styles |= {each.name: "colwise" if each.outputs == out.inputs else "colwise 1:1" for each in beside}
            styles[out.name] = "rowwise"
    return styles


def _holder(each: LinearMap) -> str:
    return each.name.rpartition(".")[0]
