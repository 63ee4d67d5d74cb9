"""Loggers that the user's step calls itself: `self.logger.experiment.add_histogram("logits", logits, step)`.

Loggers act on rank 0 only, and read tensors there. In a step of tensor, context or expert parallelism each rank has
shards, and to read one all ranks must come. So while a step runs, calls of a logger and of its experiment first make
their arguments full, on every rank, whether the logger then writes or not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Full = Callable[[str, Any], Any]
"""Makes arguments full; gets the name of what is called, for errors. All ranks whose step runs call it."""


def with_full_arguments(kind: type[Any], in_step: Callable[[], bool], full: Full) -> type[Any]:
    """A subclass of a class of loggers whose methods, and those of its experiment, get full tensors in a step.

    Args:
        kind: the class of a logger.
        in_step: whether a step of the user's runs.
        full: see `Full`.
    """

    def get(self: Any, name: str) -> Any:
        value = super(made, self).__getattribute__(name)
        if name.startswith("_") or not in_step():
            return value
        if name == "experiment":
            return _Experiment(value, full)
        return _full_call(value, f"{kind.__name__}.{name}", full) if callable(value) else value

    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__getattribute__": get}
    made: type[Any] = type(kind.__name__, (kind,), named)
    return made


class _Experiment:
    """The experiment of a logger, or the stand-in that other ranks have, while a step runs."""

    def __init__(self, experiment: Any, full: Full) -> None:
        vars(self).update(_experiment=experiment, _full=full)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experiment, name)
        return _full_call(value, f"experiment.{name}", self._full) if callable(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._experiment, name, self._full(f"experiment.{name}", value))

    def __getitem__(self, key: Any) -> Any:  # as in neptune: experiment["loss"].append(value)
        return _Experiment(self._experiment[key], self._full)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._experiment[key] = self._full(f"experiment[{key!r}]", value)


def _full_call(function: Callable[..., Any], name: str, full: Full) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = full(name, (args, kwargs))
        return function(*args, **kwargs)

    return call
