"""Gradients between backward and the optimizer's step: buckets, averages, clipping, storage."""
