"""Which modules tensor parallelism divides, and how: from a model's own metadata, or from names and shapes.

A style is "colwise" (divide what comes out), "rowwise" (divide what goes in), "colwise 4:2:2" (a fused weight, each of
whose parts is divided), "vocabulary" (an embedding or an output head), or the pair "colwise_gather_output",
"rowwise_split_input" around what every rank must see whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_parallel.plan.plan import ParallelPlan, starred

# What Hugging Face's plans call the styles; those that are not here leave a module as it is on every rank.
HUGGING_FACE = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "colwise 1:1",
    "colwise_rep": "colwise_gather_output",
    "colwise_gather_output": "colwise_gather_output",
    "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise_split_input",
    "embedding_rowwise": "vocabulary",
}

GATHERED = "colwise_gather_output"

QUERIES_KEYS_VALUES = re.compile(r"(c_attn|qkv|qkv_proj|w_?qkv|wqkv|in_proj_qkv|to_qkv)", re.I)
GATE_AND_UP = re.compile(r"(gate_up_proj|gate_up|w13|up_gate_proj)", re.I)
INTO_HEADS = re.compile(
    r"(q|k|v|q_proj|k_proj|v_proj|query|key|value|w_?q|w_?k|w_?v|to_q|to_k|to_v|q_lin|k_lin|v_lin|query_key_value)",
    re.I,
)
OUT_OF_HEADS = re.compile(r"(o|o_proj|out|out_proj|output|dense|proj|c_proj|w_?o|to_out|out_lin|attn_out)", re.I)


def find_styles(model: nn.Module, plan: ParallelPlan) -> dict[str, str]:
    """The styles of a model's modules, by pattern: those of its `tp_plan`, or those that its blocks suggest."""
    styles = _from_metadata(model) or _from_blocks(model, plan)
    return styles | _vocabulary(model, plan, styles)


# ---------------------------------------------------------------- Hugging Face's metadata


def _from_metadata(model: nn.Module) -> dict[str, str]:
    styles: dict[str, str] = {}
    for name, part in model.named_modules():
        own = getattr(part, "_tp_plan", None)
        config = getattr(part, "config", None)
        if not isinstance(own, Mapping) or not own:
            continue
        named = dict(part.named_modules())
        for pattern, text in own.items():
            style = _upgraded(pattern, text, own, config)
            if style is not None and any(starred(child) == pattern for child in named):
                styles.setdefault(f"{name}.{pattern}" if name else pattern, style)
    return styles if any(style.startswith("rowwise") for style in styles.values()) else {}


def _upgraded(pattern: str, text: str, plan: Mapping[str, str], config: Any) -> str | None:
    """Fused weights whose parts are known are divided part by part, which spares a gather of what they compute."""
    style = HUGGING_FACE.get(text)
    if style == "colwise_gather_output":
        return fused_style(pattern.rpartition(".")[2], config) or style
    if style == "rowwise_split_input":
        parent = pattern.rpartition(".")[0]
        beside = [other for other in plan if other.rpartition(".")[0] == parent and other != pattern]
        if beside and all(fused_style(other.rpartition(".")[2], config) for other in beside):
            return "rowwise"
    return style


def fused_style(name: str, config: Any) -> str | None:
    """The style of a fused weight of this name, None for any other."""
    if GATE_AND_UP.fullmatch(name):
        return "colwise 1:1"
    if not QUERIES_KEYS_VALUES.fullmatch(name):
        return None
    queries = _number(config, "num_attention_heads", "n_heads", "n_head", "num_heads")
    keys = _number(config, "num_key_value_heads", "n_kv_heads", "num_kv_heads") or queries
    return f"colwise {queries}:{keys}:{keys}" if queries and keys else "colwise 1:1:1"


def _number(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


# ---------------------------------------------------------------- names and shapes


def _from_blocks(model: nn.Module, plan: ParallelPlan) -> dict[str, str]:
    styles: dict[str, str] = {}
    for name, block in plan.find_blocks(model).items():
        for own, module in block.named_modules():
            found = _region(module, _linear_children(module))
            prefix = starred(f"{name}.{own}" if own else name)
            styles.update({f"{prefix}.{child}": style for child, style in found.items()})
    return styles


def _linear_children(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Name -> (inputs, outputs) of the linear maps that a module holds."""
    found: dict[str, tuple[int, int]] = {}
    for name, child in module.named_children():
        weight = child._parameters.get("weight")
        names = {own for own, _ in child.named_parameters(recurse=False)}
        if weight is None or weight.dim() != 2 or names - {"weight", "bias"} or isinstance(child, nn.Embedding):
            continue
        transposed = type(child).__name__ == "Conv1D"
        inputs, outputs = (0, 1) if transposed else (1, 0)
        if transposed or isinstance(child, nn.Linear):
            found[name] = (weight.shape[inputs], weight.shape[outputs])
    return found


def _region(module: nn.Module, maps: dict[str, tuple[int, int]]) -> dict[str, str]:
    """The styles of the linear maps side by side in one module."""
    heads = _attention(module, maps)
    rest = {name: size for name, size in maps.items() if name not in heads}
    return heads | _feed_forward(rest)


def _attention(module: nn.Module, maps: dict[str, tuple[int, int]]) -> dict[str, str]:
    fused = [name for name in maps if QUERIES_KEYS_VALUES.fullmatch(name)]
    separate = [name for name in maps if INTO_HEADS.fullmatch(name)]
    into = fused or separate
    out = [name for name in maps if OUT_OF_HEADS.fullmatch(name) and name not in into]
    if not into or len(out) != 1 or (not fused and len(separate) == 2):
        return {}
    inner = maps[out[0]][0]
    if not fused and inner not in (maps[separate[0]][1], maps[separate[0]][1] // 3):
        return {}
    source = getattr(module, "config", None) or module
    styles = {name: fused_style(name, source) or "colwise" for name in into}
    return styles | {out[0]: "rowwise"}


def _feed_forward(maps: dict[str, tuple[int, int]]) -> dict[str, str]:
    """Maps into some width, and the next one out of it again."""
    styles: dict[str, str] = {}
    into: list[str] = []
    for name, (inputs, outputs) in maps.items():
        matching = [other for other in into if _leads_to(other, maps[other], inputs) and maps[other][0] == outputs]
        if matching:
            styles |= {other: _into_style(other, maps[other], inputs) for other in matching} | {name: "rowwise"}
            into = []
        else:
            into.append(name)
    return styles


def _leads_to(name: str, size: tuple[int, int], inner: int) -> bool:
    return size[1] == inner or (bool(GATE_AND_UP.fullmatch(name)) and size[1] == 2 * inner)


def _into_style(name: str, size: tuple[int, int], inner: int) -> str:
    return "colwise" if size[1] == inner else "colwise 1:1"


# ---------------------------------------------------------------- the vocabulary


def _vocabulary(model: nn.Module, plan: ParallelPlan, styles: Mapping[str, str]) -> dict[str, str]:
    """The output head over a vocabulary, and the embedding of that vocabulary."""
    embeddings = dict(_embeddings(model))
    sizes = {(module.num_embeddings, module.embedding_dim) for module in embeddings.values()}
    in_blocks = {id(part) for block in plan.find_blocks(model).values() for part in block.modules()}
    heads = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and tuple(module.weight.shape) in sizes
        and id(module) not in in_blocks
        and styles.get(starred(name), GATHERED) == GATHERED
    }
    weights = {id(model.get_submodule(name)._parameters["weight"]): name for name in heads}
    shapes = {model.get_submodule(name)._parameters["weight"].shape for name in heads}  # type: ignore[union-attr]
    chosen = {
        name
        for name, module in embeddings.items()
        if id(module.weight) in weights or (module.weight.shape in shapes and module.num_embeddings > 1)
    }
    return {starred(name): "vocabulary" for name in (*sorted(chosen), *sorted(heads))}  # alike on all ranks


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    """The modules that look up rows of their weight one by one."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not (
            module.sparse or module.scale_grad_by_freq or module.max_norm is not None
        ):
            yield name, module
