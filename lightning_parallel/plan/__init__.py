"""Plans: what models say about their own parts."""

from lightning_parallel.plan.plan import ParallelPlan

__all__ = ["ParallelPlan"]
