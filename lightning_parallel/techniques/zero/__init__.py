"""ZeRO: data parallelism with sharded optimizer states, gradients and parameters."""

from lightning_parallel.techniques.zero.technique import Zero

__all__ = ["Zero"]
