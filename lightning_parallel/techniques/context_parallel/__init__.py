"""Context parallel: see `technique`."""

from lightning_parallel.techniques.context_parallel.technique import ContextParallel

__all__ = ["ContextParallel"]
