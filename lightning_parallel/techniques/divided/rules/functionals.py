"""Rules of functions in `torch.nn.functional` that torch has written in Python: computed by functions with rules.

They dispatch to a rule before they compute, so their own code never runs. Those without a rule get full tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.techniques.divided.alignment import align_shardings, as_divided, names_in_step
from lightning_parallel.techniques.divided.rules.losses import REDUCTIONS
from lightning_parallel.techniques.divided.table import by_name, operations, rule
from lightning_parallel.techniques.tools.means import WATCHING

HELPERS: Any = F
WITHOUT_WEIGHT = (F.mse_loss, F.l1_loss, F.huber_loss)
BY_ELEMENT = (*WITHOUT_WEIGHT, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy, F.kl_div,
              F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.hinge_embedding_loss,
              F.margin_ranking_loss)  # fmt: skip


@rule(*BY_ELEMENT, named=True)
def _loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Losses of single elements, such as squares, distances and divergences, and then their sum or mean."""
    named = by_name(func, args, kwargs)
    reduction, old_style = named["reduction"], (named.get("size_average"), named.get("reduce")) != (None, None)
    by_batch = func is F.kl_div and reduction == "batchmean"
    shapes = [each.shape for name, each in named.items() if name in ("input", "input1", "input2", "target")]
    unequal_shapes = len({*map(len, shapes)}) > 1 if func is F.margin_ranking_loss else shapes[0] != shapes[1]
    weighted = func in WITHOUT_WEIGHT and named["weight"] is not None
    if old_style or weighted or unequal_shapes or not (by_batch or reduction in REDUCTIONS):
        return NotImplemented  # these forms compute something else, or torch raises for them
    values = list(named.values())
    dims = max([each.dim() for each in values if isinstance(each, Tensor)])
    aligned = align_shardings(values, names_in_step(values, dims))
    if aligned is None:
        return NotImplemented
    shards = dict(zip(named, aligned[0], strict=True))
    losses = as_divided(func(**{**shards, "reduction": "none"}), aligned[1])
    if reduction == "none":
        return losses
    if reduction == "mean":
        mean, means = losses.mean(), WATCHING.get()
        return mean if means is None or not means.elements else means.note(mean, losses.numel())
    return losses.sum() / len(named["input"]) if by_batch and losses.dim() else losses.sum()


@rule(*operations("linear_cross_entropy"), named=True)  # torch 2.13 has it
def _linear_cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    named = by_name(func, args, kwargs)
    if named["options"] is not None or named["linear_weight"].dim() != 2 or named["input"].dim() > 2:
        return NotImplemented
    logits = F.linear(named["input"], named["linear_weight"], named["linear_bias"])
    ignored = -100 if named["ignore_index"] is None else named["ignore_index"]
    further = {name: named[name] for name in ("weight", "reduction", "label_smoothing")}
    return F.cross_entropy(logits, named["target"], ignore_index=ignored, **further)


OTHER_FORMS = ("use_separate_proj_weight", "bias_k", "bias_v", "static_k", "static_v", "add_zero_attn")


@rule(F.multi_head_attention_forward, named=True)
def _multi_head_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute attention as torch does in the usual form: three batched inputs of one width, and one packed weight."""
    named = by_name(func, args, kwargs)
    query, key, value, heads = (named[name] for name in ("query", "key", "value", "num_heads"))
    width = named["embed_dim_to_check"]
    one_width = all(each.dim() == 3 and each.shape[-1] == width for each in (query, key, value))
    if not one_width or key.shape != value.shape or any(named[name] not in (None, False) for name in OTHER_FORMS):
        return NotImplemented
    mask, padding, needs_weights = named["attn_mask"], named["key_padding_mask"], named["need_weights"]
    (queries, batch, _), keys = query.shape, key.shape[0]
    mask_shapes = (None, (queries, keys), (batch * heads, queries, keys))
    if (mask if mask is None else tuple(mask.shape)) not in mask_shapes or (named["is_causal"] and mask is None):
        return NotImplemented  # torch raises the error
    if padding is not None and tuple(padding.shape) != (batch, keys):
        return NotImplemented
    causal = named["is_causal"] and padding is None and not needs_weights
    q, k, v = HELPERS._in_projection_packed(query, key, value, named["in_proj_weight"], named["in_proj_bias"])
    q, k, v = (each.view(len(each), batch, heads, width // heads).permute(1, 2, 0, 3) for each in (q, k, v))
    # Merge the two masks into one, of numbers that are added to scores: [batch or 1, heads or 1, queries, keys].
    options: dict[str, Any] = {"other_type": None, "other_name": "", "target_type": query.dtype, "check_other": False}
    if causal:
        mask = None
    elif mask is not None:
        shape = (1, 1) if mask.dim() == 2 else (batch, heads)
        mask = HELPERS._canonical_mask(mask=mask, mask_name="mask", **options).view(*shape, queries, keys)
    if padding is not None:
        padding = HELPERS._canonical_mask(mask=padding, mask_name="mask", **options).view(batch, 1, 1, keys)
        mask = padding if mask is None else mask + padding
    dropped = named["dropout_p"] if named["training"] else 0.0
    weights = None
    if needs_weights:
        scores = (q * math.sqrt(heads / width)) @ k.transpose(-2, -1)
        weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), dropped)
        attended = weights @ v
        weights = weights.mean(1) if named["average_attn_weights"] else weights
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropped, causal)
    attended = attended.permute(2, 0, 1, 3).reshape(queries * batch, width)
    output = F.linear(attended, named["out_proj_weight"], named["out_proj_bias"])
    return output.view(queries, batch, output.shape[1]), weights
