"""Pictures, drawn by matplotlib where it is installed."""

from __future__ import annotations

from typing import Any


def figure(width: float, height: float) -> Any:
    """An empty figure on white.

    Args:
        width: in inches.
        height: in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "pictures are drawn by matplotlib, which is not installed: pip install 'lightning-parallel[recipes]'"
        ) from missing
    return Figure(figsize=(width, height), facecolor="white")
