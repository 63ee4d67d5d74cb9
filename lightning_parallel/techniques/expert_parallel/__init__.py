"""Expert parallel: see `technique`."""

from lightning_parallel.techniques.expert_parallel.technique import ExpertParallel

__all__ = ["ExpertParallel"]
