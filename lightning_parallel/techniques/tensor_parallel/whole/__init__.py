"""Tensors of which a rank has a part, and that look whole."""
