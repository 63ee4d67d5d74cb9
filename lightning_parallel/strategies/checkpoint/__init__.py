"""Checkpoints: saving, reading and resuming from them."""
