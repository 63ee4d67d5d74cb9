"""The caches of keys and values that Hugging Face's models fill, also where they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""The names under which most layers get them."""
BUILT_IN = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, slice, range)
"""Types that are no caches; they are asked for first, as dynamo of torch 2.11 breaks a graph at their names."""


def is_cache(value: Any) -> bool:
    """Whether a value holds keys and values of earlier positions; who runs a layer twice must not add to it twice."""
    return type(value) not in BUILT_IN and type(value).__name__.endswith("Cache")


def is_filled_by_layers(name: str, value: Any) -> bool:
    """Whether an argument is a cache to which layers add: by its name, or as Hugging Face's under any name."""
    return is_cache(value) and (name in CACHES or getattr(value, "get_seq_length", None) is not None)


def layers_in(block: nn.Module) -> list[int]:
    """The numbers by which the layers of a block, as Hugging Face's, find their keys in a cache."""
    return [part.layer_idx for part in block.modules() if isinstance(getattr(part, "layer_idx", None), int)]  # type: ignore[misc]


def holds_keys(cache: Any, layers: Sequence[int]) -> bool:
    """Whether a cache has keys for layers that are yet to run: these are inputs, as learned prefixes are."""
    length = getattr(cache, "get_seq_length", None)
    return length is not None and any(length(layer) for layer in layers)
