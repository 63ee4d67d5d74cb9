"""Functions of `torch.nn.functional` that torch has written in Python of others which have rules: the same, by them.

They ask for rules before they compute, so their own code is not reached. Others of that kind get wholes.
"""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction

from lightning_parallel.techniques.divided.table import rule

NN: Any = torch._C._nn
HELPERS: Any = F

# The function that computes a loss, and which arguments it takes in which order.
LOSSES: dict[Any, tuple[Any, str, str]] = {
    F.mse_loss: (NN, "mse_loss", "input target reduction"),
    F.l1_loss: (NN, "l1_loss", "input target reduction"),
    F.smooth_l1_loss: (NN, "smooth_l1_loss", "input target reduction beta"),
    F.huber_loss: (NN, "huber_loss", "input target reduction delta"),
    F.soft_margin_loss: (NN, "soft_margin_loss", "input target reduction"),
    F.binary_cross_entropy: (NN, "binary_cross_entropy", "input target weight reduction"),
    F.binary_cross_entropy_with_logits: (
        torch, "binary_cross_entropy_with_logits", "input target weight pos_weight reduction",
    ),
    F.kl_div: (torch, "kl_div", "input target reduction"),
    F.poisson_nll_loss: (torch, "poisson_nll_loss", "input target log_input full eps reduction"),
    F.hinge_embedding_loss: (torch, "hinge_embedding_loss", "input target margin reduction"),
    F.margin_ranking_loss: (torch, "margin_ranking_loss", "input1 input2 target margin reduction"),
    F.nll_loss: (NN, "nll_loss_nd", "input target weight reduction ignore_index"),
}  # fmt: skip
WITHOUT_WEIGHT = (F.mse_loss, F.l1_loss, F.huber_loss)
DEFAULTS = {
    function: {name: each.default for name, each in signature(function).parameters.items()}
    for function in (*LOSSES, F.multi_head_attention_forward, F.linear_cross_entropy)
}


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return {**DEFAULTS[func], **dict(zip(DEFAULTS[func], args, strict=False)), **kwargs}


@rule(*LOSSES)
def _loss(func: Any, args: Any, kwargs: Any) -> Any:
    given = _given(func, args, kwargs)
    old_style = given.get("size_average") is not None or given.get("reduce") is not None
    weighted = func in WITHOUT_WEIGHT and given["weight"] is not None
    shapes = [each.shape for name, each in given.items() if name in ("input", "input1", "input2", "target")]
    if func is F.margin_ranking_loss:
        unlike = len({*map(len, shapes)}) > 1
    else:
        unlike = func is not F.nll_loss and shapes[0] != shapes[1]
    if old_style or weighted or unlike or (func is F.smooth_l1_loss and given["beta"] == 0):
        return NotImplemented  # in these forms it computes otherwise, or says what is wrong
    if func is F.binary_cross_entropy and given["weight"] is not None:
        given["weight"] = given["weight"].expand(shapes[1])
    owner, name, order = LOSSES[func]
    reduction, by_batch = given["reduction"], given["reduction"] == "batchmean" and func is F.kl_div
    given["reduction"] = _reduction.get_enum("sum" if by_batch else reduction)
    options = {"log_target": given["log_target"]} if func is F.kl_div else {}
    # Looked up in the module, where losses that a step records are found.
    found: Tensor = getattr(owner, name)(*[given[each] for each in order.split()], **options)
    return found / len(given["input"]) if by_batch and given["input"].dim() else found


@rule(F.linear_cross_entropy)
def _linear_cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    given = _given(func, args, kwargs)
    if given["options"] is not None or given["linear_weight"].dim() != 2 or given["input"].dim() > 2:
        return NotImplemented
    logits = F.linear(given["input"], given["linear_weight"], given["linear_bias"])
    ignored = -100 if given["ignore_index"] is None else given["ignore_index"]
    further = {name: given[name] for name in ("weight", "reduction", "label_smoothing")}
    return F.cross_entropy(logits, given["target"], ignore_index=ignored, **further)


OTHER_FORMS = ("use_separate_proj_weight", "bias_k", "bias_v", "static_k", "static_v", "add_zero_attn")


@rule(F.multi_head_attention_forward)
def _multi_head_attention(func: Any, args: Any, kwargs: Any) -> Any:
    """As torch computes it, for the usual form: three batched inputs of one width, and one weight for all of them."""
    given = _given(func, args, kwargs)
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
    mask = None if causal else _mask(mask, padding, query.dtype, (batch, heads, length, others))
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


def _mask(mask: Any, padding: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    """The two masks in one, (batch or 1, heads or 1, queries, keys), of numbers that are added to scores."""
    batch, heads, queries, keys = shape
    options: dict[str, Any] = {"other_type": None, "other_name": "", "target_type": dtype, "check_other": False}
    mask, padding = (HELPERS._canonical_mask(mask=each, mask_name="mask", **options) for each in (mask, padding))
    if mask is not None:
        mask = mask.view(1, 1, queries, keys) if mask.dim() == 2 else mask.view(batch, heads, queries, keys)
    if padding is not None:
        padding = padding.view(batch, 1, 1, keys)
        mask = padding if mask is None else mask + padding
    return mask
