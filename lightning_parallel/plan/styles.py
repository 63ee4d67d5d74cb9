"""Which modules tensor parallelism divides, and how: from a model's own metadata, or from names and shapes.

A style is "colwise" (divide what comes out), "rowwise" (divide what goes in), "colwise 4:2:2" (a fused weight, each of
whose parts is divided), "vocabulary" (an embedding or an output head), or the pair "colwise_gather_output",
"rowwise_split_input" around what every rank must see whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_parallel.plan.find import plans, within
from lightning_parallel.plan.plan import ParallelPlan, matching, starred
from lightning_parallel.plan.regions import fused_style, linear_maps, styles_in_blocks

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


def find_styles(model: nn.Module, plan: ParallelPlan) -> dict[str, str]:
    """The styles of a model's modules, by pattern: those of its `tp_plan`, or those that its blocks suggest.

    Where nothing suggests any, linear maps are divided by what comes out of them; where there are none, embeddings.
    """
    styles = _from_metadata(model) or styles_in_blocks(model, plan)
    if styles := styles | _vocabulary(model, plan, styles):
        return styles
    maps = {each.name: "colwise" for each in linear_maps(model) if each.outputs > 1}
    return maps or {name: "vocabulary" for name, module in _embeddings(model) if module.num_embeddings > 1}


# ---------------------------------------------------------------- Hugging Face's metadata


def _from_metadata(model: nn.Module) -> dict[str, str]:
    styles: dict[str, str] = {}
    for name, part, plan in plans(model, "tp"):
        named = {starred(child) for child, _ in part.named_modules()}
        for pattern, text in plan.items():
            style, config = HUGGING_FACE.get(text), getattr(part, "config", None)
            # Fused weights whose parts are known are divided part by part, which spares a gather of what they compute.
            parent, _, own = pattern.rpartition(".")
            if style == GATHERED:
                style = fused_style(own, config) or style
            elif style == "rowwise_split_input":
                beside = [other for other in plan if other.rpartition(".")[0] == parent and other != pattern]
                if beside and all(fused_style(other.rpartition(".")[2], config) for other in beside):
                    style = "rowwise"
            if style is not None and pattern in named:
                styles.setdefault(within(name, pattern), style)
    return styles if any(style.startswith("rowwise") for style in styles.values()) else {}


# ---------------------------------------------------------------- the vocabulary


def _vocabulary(model: nn.Module, plan: ParallelPlan, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the style of output heads over a vocabulary, and of the embeddings of that vocabulary."""
    embeddings = dict(_embeddings(model))
    shapes = {(each.num_embeddings, each.embedding_dim) for each in embeddings.values()}
    in_blocks = {id(part) for block in plan.find_blocks(model).values() for part in block.modules()}
    heads: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")  # None where it is computed, as by parametrizations
        outside = id(module) not in in_blocks and styles.get(starred(name), GATHERED) == GATHERED
        if isinstance(module, nn.Linear) and weight is not None and tuple(weight.shape) in shapes and outside:
            heads[name] = weight
    sizes = {weight.shape for weight in heads.values()}
    chosen = {
        name
        for name, each in embeddings.items()
        if any(each.weight is weight for weight in heads.values())
        or (each.weight.shape in sizes and each.num_embeddings > 1)
    }
    found = (*sorted(chosen), *sorted(heads))  # in one order on all ranks
    siblings = {name: {other for other, _ in matching(model, starred(name))} for name in found}
    # An nn.Sequential has its embedding and its head among other layers.
    return {starred(name) if siblings[name] <= {*found} else name: "vocabulary" for name in found}


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    """Find the modules that look up rows of their weight one by one."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module._parameters.get("weight") is None:
            continue
        if not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None):
            yield name, module
