"""Plans: names of a model's parts (blocks, experts, ...) for the techniques, given by users or found in the model."""

from lightning_parallel.plan.plan import ParallelPlan

__all__ = ["ParallelPlan"]
