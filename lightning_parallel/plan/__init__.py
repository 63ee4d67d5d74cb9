"""What a model says about its own parts."""

from lightning_parallel.plan.plan import ParallelPlan

__all__ = ["ParallelPlan"]
