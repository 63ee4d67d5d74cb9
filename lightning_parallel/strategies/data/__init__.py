"""Data: the samples that a rank reads, and what draws their order."""
