"""The caches of keys and values that Hugging Face's models fill, also where they train."""

from __future__ import annotations

from typing import Any

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""The names under which layers get them."""


def is_cache(value: Any) -> bool:
    """Whether a value holds keys and values of earlier positions; who runs a layer twice must not add to it twice."""
    return type(value).__name__.endswith("Cache")
