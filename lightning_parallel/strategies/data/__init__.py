"""Data: which samples a rank reads, and the random states that determine their order."""
