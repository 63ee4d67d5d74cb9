"""The loss of a language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_parallel as lp

IGNORED = -100  # the label of a position that has no target


def cross_entropy(x: Tensor, head: nn.Module, labels: Tensor, chunks: int = 1) -> Tensor:
    """Return the mean cross-entropy of the labels (B, T) that are not ignored, in at least single precision.

    Args:
        x: The hidden state (B, T, C), normalised.
        head: Maps it to logits.
        labels: What comes next, or ``IGNORED``.
        chunks: Into how many parts the tokens are divided. Of one part after the other logits are made, in forward and
            again in backward, so that those of all tokens never exist: in the precision of the model, in single
            precision and as gradients they are most of the memory of a small model with a large vocabulary. The price
            is the head's forward once more.
    """
    rows, targets = x.flatten(0, 1), labels.flatten()
    if chunks == 1:
        return _loss(head, rows, targets, "mean")
    parts = zip(rows.chunk(chunks), targets.chunk(chunks), strict=True)
    sums = [checkpoint(_loss, head, *part, "sum", use_reentrant=False, preserve_rng_state=False) for part in parts]
    return lp.mean(torch.stack(sums).sum(), (targets != IGNORED).sum())


def _loss(head: nn.Module, rows: Tensor, targets: Tensor, reduction: str) -> Tensor:
    logits = head(rows)
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(exact), targets, ignore_index=IGNORED, reduction=reduction)
