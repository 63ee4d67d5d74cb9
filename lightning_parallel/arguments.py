"""Checks of user arguments. Each error names the value, the rule and the remedy."""

from __future__ import annotations


def one_of(owner: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`; the message names `owner`, the value and the choices."""
    if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices):
        raise ValueError(f"{owner}({name}={value!r}): {name} is one of {', '.join(map(repr, choices))}")


def true_or_false(owner: str, **values: object) -> None:
    """Raise ValueError for each value that is not a bool: the string 'no' would be true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{owner}({name}={value!r}): {name} is True or False (true or false on a command line)")


def whole_number(owner: str, name: str, value: object, *others: object) -> None:
    """Raise ValueError unless `value` is a positive integer or one of `others`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    if not any(value is other or value == other for other in others):
        rule = " or ".join(["a positive whole number", *map(repr, others)])
        raise ValueError(f"{owner}({name}={value!r}): {name} is {rule}")
