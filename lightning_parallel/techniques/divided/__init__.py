"""A tensor that looks whole, of which each rank has and computes some elements, and the rules of its operations."""
