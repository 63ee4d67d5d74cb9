"""Activation checkpointing: blocks keep their inputs and recompute the rest in backward."""

from lightning_parallel.techniques.activation_checkpoint.technique import ActivationCheckpoint

__all__ = ["ActivationCheckpoint"]
