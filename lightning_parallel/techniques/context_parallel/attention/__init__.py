"""Attention over a sequence that ranks have divided: see `attention`, which names its parts."""

from lightning_parallel.techniques.context_parallel.attention.attention import ContextAttention

__all__ = ["ContextAttention"]
