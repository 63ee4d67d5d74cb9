"""The tokens that a rank sends to experts: of what ranks have divided its own, of what they have alike its share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from torch import Tensor

from lightning_parallel.collectives.by_elements import joined, part
from lightning_parallel.collectives.elements import Ranks
from lightning_parallel.techniques.divided.tensor import Cuts, Divided, is_divided, own_of


@dataclass(frozen=True)
class Tokens:
    """A rank's own tokens in one call of experts.

    Attributes:
        hidden: (tokens, features).
        index: the experts that each chose, (tokens, k).
        weights: of these, (tokens, k).
        summands: over how many ranks of those whose gradients are averaged the tokens are divided, so that what each
            computes is a summand of a gradient.
        back: from what experts made of own tokens, (tokens, features), what the call returns.
    """

    hidden: Tensor
    index: Tensor
    weights: Tensor
    summands: int
    back: Callable[[Tensor], Tensor]


def own_tokens(hidden: Tensor, index: Tensor, weights: Tensor, alike: Ranks | None) -> Tokens:
    """Takes a rank's own tokens.

    Args:
        hidden: (..., features), plain or divided.
        index: (..., k).
        weights: (..., k).
        alike: ranks that have the same tokens unless they divided them, and share the work on these; None: nobody.
    """
    cuts = _cuts_of_tokens(hidden)
    hidden = own_of(hidden, cuts)
    index, weights = (own_of(each, cuts) for each in (index, weights))
    leading = hidden.shape[:-1]
    hidden, index, weights = (each.reshape(-1, each.shape[-1]) for each in (hidden, index, weights))
    ranks = {id(elements.ranks): elements.ranks for elements in cuts.values()}.values()
    shares = None
    if alike is not None and not any(each.name == alike.name for each in ranks):
        shares = alike.chunks(len(hidden))
        hidden, index, weights = (part(each, 0, shares) for each in (hidden, index, weights))

    def back(made: Tensor) -> Tensor:
        made = made if shares is None else joined(made, 0, shares)
        made = made.reshape(*leading, made.shape[-1])
        return Divided(made, cuts) if cuts else made

    return Tokens(hidden, index, weights, prod(each.count for each in ranks if each.averages), back)


def _cuts_of_tokens(hidden: Tensor) -> Cuts:
    """The dimensions of tokens that are divided; none where features are, or ranks have copies."""
    if not is_divided(hidden):
        return {}
    by_tokens = all(dim < hidden.dim() - 1 and elements.disjoint for dim, elements in hidden.cuts.items())
    return hidden.cuts if by_tokens else {}
