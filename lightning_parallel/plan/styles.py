"""Which modules tensor parallelism shards, and how: from a model's own metadata, or from names and shapes.

A style is "colwise" (shard output features), "rowwise" (shard input features), "colwise 4:2:2" (a fused weight, each of
whose parts is sharded), "vocabulary" (an embedding or an output head), or one of the pair "colwise_gather_output",
"rowwise_split_input", between which every rank has the full activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_parallel.plan.find import plans, within
from lightning_parallel.plan.plan import ParallelPlan, matching, starred
from lightning_parallel.plan.regions import fused_style, linear_maps, styles_in_blocks

# Hugging Face's names of the styles; other names of theirs leave a module replicated.
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
    """Return pattern -> style for a model's modules: from its `tp_plan`, or else guessed from the blocks.

    The vocabulary is added. Without any style, linear maps are "colwise"; without linear maps, embeddings "vocabulary".
    """
    styles = _from_metadata(model) or styles_in_blocks(model, plan)
    if styles := styles | _vocabulary(model, plan, styles):
        return styles
    maps = {linear.name: "colwise" for linear in linear_maps(model) if linear.outputs > 1}
    return maps or {name: "vocabulary" for name, module in _embeddings(model) if module.num_embeddings > 1}


# ---------------------------------------------------------------- Hugging Face's metadata


def _from_metadata(model: nn.Module) -> dict[str, str]:
    styles: dict[str, str] = {}
    for name, part, plan in plans(model, "tp"):
        named = {starred(child) for child, _ in part.named_modules()}
        for pattern, their_style in plan.items():
            style, config = HUGGING_FACE.get(their_style), getattr(part, "config", None)
            # If the parts of a fused weight are known, each part is sharded, which saves a gather of its output.
            parent, _, last_name = pattern.rpartition(".")
            if style == GATHERED:
                style = fused_style(last_name, config) or style
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
    shapes = {(embedding.num_embeddings, embedding.embedding_dim) for embedding in embeddings.values()}
    in_blocks = {id(part) for block in plan.find_blocks(model).values() for part in block.modules()}
    heads: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")  # None if it is computed, as by parametrizations
        outside = id(module) not in in_blocks and styles.get(starred(name), GATHERED) == GATHERED
        if isinstance(module, nn.Linear) and weight is not None and tuple(weight.shape) in shapes and outside:
            heads[name] = weight
    sizes = {weight.shape for weight in heads.values()}
    chosen = {
        name
        for name, embedding in embeddings.items()
        if any(embedding.weight is weight for weight in heads.values())
        or (embedding.weight.shape in sizes and embedding.num_embeddings > 1)
    }
    names = (*sorted(chosen), *sorted(heads))  # the same order on all ranks
    siblings = {name: {other for other, _ in matching(model, starred(name))} for name in names}
    # In an nn.Sequential, the pattern of an embedding or a head would match other layers, too.
    return {starred(name) if siblings[name] <= {*names} else name: "vocabulary" for name in names}


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    """Yield the embeddings that look up each row independently, by name."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module._parameters.get("weight") is None:
            continue
        if not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None):
            yield name, module
