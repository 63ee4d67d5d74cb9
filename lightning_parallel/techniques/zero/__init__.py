"""ZeRO: states, gradients and parameters in shards."""

from lightning_parallel.techniques.zero.technique import Zero

__all__ = ["Zero"]
