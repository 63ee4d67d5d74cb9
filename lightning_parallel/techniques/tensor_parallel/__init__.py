"""Tensor parallel: see `technique`, which names its parts in the order in which they act."""

from lightning_parallel.techniques.tensor_parallel.technique import TensorParallel

__all__ = ["TensorParallel"]
