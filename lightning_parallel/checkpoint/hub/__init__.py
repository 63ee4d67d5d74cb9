"""Weights of the Hugging Face hub: read and written where they are, one tensor at a time."""
