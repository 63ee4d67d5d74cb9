"""Sharded checkpoints as folders: their format, how they are written, committed, verified and read. See `folder`."""
