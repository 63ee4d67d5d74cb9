"""The rules of operations on divided tensors; importing this package enters all of them in the table."""

from lightning_parallel.techniques.divided.rules import (
    attention,
    functionals,
    gradients,
    indexing,
    losses,
    parameters,
    pointwise_losses,
    products,
    reductions,
    shapes,
    single,
)

__all__ = [
    "attention",
    "functionals",
    "gradients",
    "indexing",
    "losses",
    "parameters",
    "pointwise_losses",
    "products",
    "reductions",
    "shapes",
    "single",
]
