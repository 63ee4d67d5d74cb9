"""Sharded checkpoints as folders: the format, and how they are written, committed, verified and read. See `folder`."""
