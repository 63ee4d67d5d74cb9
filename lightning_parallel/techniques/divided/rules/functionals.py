"""Functions of `torch.nn.functional` that torch has written in Python of others which have rules: the same, by them.

They ask for rules before they compute, so their own code is not reached. Others of that kind get wholes.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.techniques.divided.meeting import as_divided, brought_together, names_in_step
from lightning_parallel.techniques.divided.rules.losses import REDUCTIONS
from lightning_parallel.techniques.divided.table import by_name, rule
from lightning_parallel.techniques.tools.means import mean_over_elements

HELPERS: Any = F
WITHOUT_WEIGHT = (F.mse_loss, F.l1_loss, F.huber_loss)
BY_ELEMENT = (*WITHOUT_WEIGHT, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy, F.kl_div,
              F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.hinge_embedding_loss,
              F.margin_ranking_loss)  # fmt: skip


@rule(*BY_ELEMENT, named=True)
def _loss(func: Any, args: Any, kwargs: Any) -> Any:
    """Squares, distances, divergences: each element's own, and then their sum or mean."""
    given = by_name(func, args, kwargs)
    reduction, old_style = given["reduction"], (given.get("size_average"), given.get("reduce")) != (None, None)
    by_batch = func is F.kl_div and reduction == "batchmean"
    shapes = [each.shape for name, each in given.items() if name in ("input", "input1", "input2", "target")]
    unlike = len({*map(len, shapes)}) > 1 if func is F.margin_ranking_loss else shapes[0] != shapes[1]
    weighted = func in WITHOUT_WEIGHT and given["weight"] is not None
    if old_style or weighted or unlike or not (by_batch or reduction in REDUCTIONS):
        return NotImplemented  # in these forms it computes otherwise, or says what is wrong
    values = list(given.values())
    dims = max([each.dim() for each in values if isinstance(each, Tensor)])
    mine = brought_together(values, names_in_step(values, dims))
    if mine is None:
        return NotImplemented
    own = dict(zip(given, mine[0], strict=True))
    losses = as_divided(func(**{**own, "reduction": "none"}), mine[1])
    if reduction == "none":
        return losses
    if reduction == "mean":
        return mean_over_elements(losses.mean(), losses.numel())
    return losses.sum() / len(given["input"]) if by_batch and losses.dim() else losses.sum()


@rule(F.linear_cross_entropy, named=True)
def _linear_cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    given = by_name(func, args, kwargs)
    if given["options"] is not None or given["linear_weight"].dim() != 2 or given["input"].dim() > 2:
        return NotImplemented
    logits = F.linear(given["input"], given["linear_weight"], given["linear_bias"])
    ignored = -100 if given["ignore_index"] is None else given["ignore_index"]
    further = {name: given[name] for name in ("weight", "reduction", "label_smoothing")}
    return F.cross_entropy(logits, given["target"], ignore_index=ignored, **further)


OTHER_FORMS = ("use_separate_proj_weight", "bias_k", "bias_v", "static_k", "static_v", "add_zero_attn")


@rule(F.multi_head_attention_forward, named=True)
def _multi_head_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """As torch computes it, for the usual form: three batched inputs of one width, and one weight for all of them."""
    given = by_name(func, args, kwargs)
    query, key, value, heads = (given[name] for name in ("query", "key", "value", "num_heads"))
    width = given["embed_dim_to_check"]
    one_width = all(each.dim() == 3 and each.shape[-1] == width for each in (query, key, value))
    if not one_width or key.shape != value.shape or any(given[name] not in (None, False) for name in OTHER_FORMS):
        return NotImplemented
    mask, padding, needs_weights = given["attn_mask"], given["key_padding_mask"], given["need_weights"]
    (length, batch, _), others = query.shape, key.shape[0]
    of_mask = (None, (length, others), (batch * heads, length, others))
    if (mask if mask is None else tuple(mask.shape)) not in of_mask or (given["is_causal"] and mask is None):
        return NotImplemented  # torch says what is wrong
    if padding is not None and tuple(padding.shape) != (batch, others):
        return NotImplemented
    causal = given["is_causal"] and padding is None and not needs_weights
    q, k, v = HELPERS._in_projection_packed(query, key, value, given["in_proj_weight"], given["in_proj_bias"])
    q, k, v = (each.view(len(each), batch, heads, width // heads).permute(1, 2, 0, 3) for each in (q, k, v))
    # The two masks in one, of numbers that are added to scores: [batch or 1, heads or 1, queries, keys].
    options: dict[str, Any] = {"other_type": None, "other_name": "", "target_type": query.dtype, "check_other": False}
    if causal:
        mask = None
    elif mask is not None:
        shape = (1, 1) if mask.dim() == 2 else (batch, heads)
        mask = HELPERS._canonical_mask(mask=mask, mask_name="mask", **options).view(*shape, length, others)
    if padding is not None:
        padding = HELPERS._canonical_mask(mask=padding, mask_name="mask", **options).view(batch, 1, 1, others)
        mask = padding if mask is None else mask + padding
    dropped = given["dropout_p"] if given["training"] else 0.0
    weights = None
    if needs_weights:
        scores = (q * math.sqrt(heads / width)) @ k.transpose(-2, -1)
        weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), dropped)
        attended = weights @ v
        weights = weights.mean(1) if given["average_attn_weights"] else weights
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropped, causal)
    attended = attended.permute(2, 0, 1, 3).reshape(length * batch, width)
    output = F.linear(attended, given["out_proj_weight"], given["out_proj_bias"])
    return output.view(length, batch, output.shape[1]), weights
