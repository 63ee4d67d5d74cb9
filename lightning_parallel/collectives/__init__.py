"""Collectives, messages between two ranks, and the elements of tensors that each rank has."""
