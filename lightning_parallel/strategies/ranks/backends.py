"""By which backend ranks talk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_parallel.strategies.lightning_package import _get_default_process_group_backend_for_device


def backend_for(devices: Sequence[torch.device], chosen: str | None) -> str:
    """By what the ranks of a node talk, whose devices these are.

    Raises:
        ValueError: NCCL was chosen for ranks that share a GPU.
    """
    shared = len(set(devices)) < len(devices) and devices[0].type != "cpu"
    if shared and "nccl" in (chosen or ""):
        raise ValueError(
            f"process_group_backend={chosen!r} does not talk between ranks that share a device, and {len(devices)} "
            f"ranks have {len(set(devices))}; leave it out, or pass 'gloo', which goes through the host"
        )
    return chosen or ("gloo" if shared else _get_default_process_group_backend_for_device(devices[0]))
