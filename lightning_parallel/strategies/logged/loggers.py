"""Full tensors for loggers that the user's step calls: `self.logger.experiment.add_histogram("logits", logits, step)`.

A logger reads and writes on rank 0 only. In a step under tensor, context or expert parallelism each rank has shards of
tensors, and gathering a full one is a collective. So while a step runs, every call of a logger or of its experiment
first gathers its arguments on all ranks, including those on which the logger writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

Full = Callable[[str, Any], Any]
"""Gathers the arguments of a call; the string names the call in errors. All ranks that run the step must call it."""


def with_full_arguments(kind: type[Any], in_step: Callable[[], bool], full: Full) -> type[Any]:
    """Return a subclass of a logger class: in a step its methods, and those of its experiment, get full tensors.

    Args:
        kind: the class of a logger.
        in_step: returns whether the user's step is running.
        full: gathers arguments, see `Full`.
    """

    def get(self: Any, name: str) -> Any:
        value = super(subclass, self).__getattribute__(name)
        if name.startswith("_") or not in_step():
            return value
        if name == "experiment":
            return _Experiment(value, full)
        return _full_call(value, f"{kind.__name__}.{name}", full) if callable(value) else value

    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__getattribute__": get}
    subclass: type[Any] = type(kind.__name__, (kind,), namespace)
    return subclass


class _Experiment:
    """Proxy for a logger's experiment (a dummy on ranks other than 0) whose methods get full tensors during a step."""

    def __init__(self, experiment: Any, full: Full) -> None:
        vars(self).update(_experiment=experiment, _full=full)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experiment, name)
        return _full_call(value, f"experiment.{name}", self._full) if callable(value) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._experiment, name, self._full(f"experiment.{name}", value))

    def __getitem__(self, key: Any) -> Any:  # as in Neptune: experiment["loss"].append(value)
        return _Experiment(self._experiment[key], self._full)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._experiment[key] = self._full(f"experiment[{key!r}]", value)


def _full_call(function: Callable[..., Any], name: str, full: Full) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = full(name, (args, kwargs))
        return function(*args, **kwargs)

    return call
