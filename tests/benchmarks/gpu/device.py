"""A device and its clock: when its work is done, how much memory it took, and how fast it multiplies."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """Where everything is measured.

    Args:
        kind: "cuda" or "cpu".
    """

    kind: str

    @property
    def torch(self) -> torch.device:
        return torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(0) if self.is_gpu else "CPU"

    def finish(self) -> None:
        """Waits for all that was started."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def forget_peak(self) -> None:
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """Bytes that torch had given out at once, since the peak was forgotten; None where nobody counts."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else None

    def let_go(self) -> None:
        if self.is_gpu:
            torch.cuda.empty_cache()


def multiplication_rates(device: Device, shapes: list[tuple[int, int, int]], seconds: float) -> dict[str, float]:
    """FLOPs a second of products in bfloat16, (m, k) by (k, n): the median of several spells of each shape."""
    return {f"{m} x {k} x {n}": _rate(device, m, k, n, seconds / len(shapes)) for m, k, n in shapes}


def _rate(device: Device, m: int, k: int, n: int, seconds: float) -> float:
    left = torch.randn(m, k, device=device.torch, dtype=torch.bfloat16)
    right = torch.randn(n, k, device=device.torch, dtype=torch.bfloat16).t()
    once = _time_of(device, left, right, 3) / 3
    times = max(1, round(seconds / 5 / once))
    return 2 * m * k * n / statistics.median(_time_of(device, left, right, times) / times for _ in range(5))


def _time_of(device: Device, left: torch.Tensor, right: torch.Tensor, times: int) -> float:
    device.finish()
    start = time.perf_counter()
    for _ in range(times):
        left @ right
    device.finish()
    return time.perf_counter() - start
