"""The rules of operations on `Divided` tensors; importing this package enters all of them in the table."""

from lightning_parallel.techniques.divided.rules import (  # noqa: F401
    attention,
    functionals,
    indexing,
    losses,
    parameters,
    products,
    reductions,
    shapes,
    single,
)
