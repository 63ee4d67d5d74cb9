"""Which samples a rank reads, and what draws their order."""
