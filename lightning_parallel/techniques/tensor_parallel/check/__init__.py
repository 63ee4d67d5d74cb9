"""Whether a block computes the same with a part of its heads and features."""
