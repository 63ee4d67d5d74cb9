"""The user's code, run for its shapes before a model is divided."""
