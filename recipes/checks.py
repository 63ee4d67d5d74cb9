"""Checks of configured values: a wrong value is an error before anything is built or read."""

from __future__ import annotations

import math
from collections.abc import Sequence


class ConfigurationError(ValueError):
    """A value or data with which training is impossible; the message has the value and the remedy."""


def whole(at_least: int, **values: object) -> None:
    """Raise ConfigurationError for a value that is not a whole number, or is too small."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ConfigurationError(f"{name.replace('__', '.')}={value} must be a whole number, {at_least} or more")


def number(at_least: float, below: float = math.inf, **values: object) -> None:
    """Raise ConfigurationError for a value that is not a number, or is out of range."""
    for name, value in values.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not at_least <= value < below:
            end = "" if below == math.inf else f" and less than {below:g}"
            raise ConfigurationError(f"{name.replace('__', '.')}={value} must be a number, {at_least:g} or more{end}")


def choice(choices: Sequence[object], **values: object) -> None:
    """Raise ConfigurationError for a value that is not one of the choices."""
    for name, value in values.items():
        if value not in choices:
            raise ConfigurationError(f"{name.replace('__', '.')}={value} must be one of {', '.join(map(str, choices))}")


def flag(**values: object) -> None:
    """Raise ConfigurationError for a value that is neither true nor false: the word "no" would count as true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name.replace('__', '.')}={value} must be true or false")
