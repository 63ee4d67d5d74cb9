"""What ``conf/`` asks the machine: ``${default_devices:}`` and the like."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from omegaconf import OmegaConf


def default_accelerator() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_devices() -> int:
    """Return the number of visible GPUs; without any, two processes."""
    return torch.cuda.device_count() or 2


def stdlib_sources() -> str:
    """Return a glob of the running Python's standard library."""
    return str(Path(sysconfig.get_path("stdlib")) / "**" / "*.py")


def register() -> None:
    """Make the functions of this file known to OmegaConf by their names."""
    for resolver in (default_accelerator, default_devices, stdlib_sources):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
