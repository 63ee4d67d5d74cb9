"""The device with its clock, and what is trained: a model of the recipes, its batches, its operations in a step."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import recipes.train  # noqa: F401  # registers what configurations ask the machine
from recipes.gpt import GPTConfig, GPTModule

CONF = Path(__file__).parents[3] / "conf"


@dataclass(frozen=True)
class Device:
    """Where everything is measured: "cuda" or "cpu"."""

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

    def finish(self, forget_peak: bool = False) -> None:
        """Waits for all that was started."""
        if self.is_gpu:
            torch.cuda.synchronize()
            if forget_peak:
                torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """Bytes that torch had given out at once, since the peak was forgotten; None where nobody counts."""
        return torch.cuda.max_memory_allocated() if self.is_gpu else None

    def rate(self, m: int, k: int, n: int, seconds: float) -> float:
        """FLOPs a second of products in bfloat16, (m, k) by (k, n): the median of several spells."""
        left = torch.randn(m, k, device=self.torch, dtype=torch.bfloat16)
        right = torch.randn(n, k, device=self.torch, dtype=torch.bfloat16).t()

        def time_of(times: int) -> float:
            self.finish()
            start = time.perf_counter()
            for _ in range(times):
                left @ right
            self.finish()
            return time.perf_counter() - start

        times = max(1, round(seconds / 5 / (time_of(3) / 3)))
        return 2 * m * k * n / statistics.median(time_of(times) / times for _ in range(5))


@dataclass(frozen=True)
class Job:
    """A size of the benchmark.

    Args:
        model: a choice of conf/model.
        batch: sequences in a step.
        steps: that are measured of each fit.
        warm_up: steps before them.
        chunks: of tokens, where the loss is computed in chunks.
        shapes: of products whose rate is measured besides those of the model.
    """

    model: str
    batch: int
    steps: int
    warm_up: int
    chunks: int
    shapes: tuple[tuple[int, int, int], ...] = ()

    @property
    def chosen(self) -> Any:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("train", [f"model={self.model}", "output_dir=."]).model

    def module(self, kind: type[GPTModule] = GPTModule, **changes: Any) -> GPTModule:
        chosen: Any = OmegaConf.to_container(self.chosen, resolve=True)
        options = {name: value for name, value in chosen.items() if not name.startswith("_") and name != "config"}
        return kind(self.config, **(options | {"fused": True} | changes))

    @property
    def config(self) -> GPTConfig:
        return instantiate(self.chosen).config

    @property
    def tokens(self) -> int:
        return self.batch * self.config.context

    @property
    def flops(self) -> float:
        """Of a step, without what is computed twice: 2 for each weight of a product and token, and half of attention.

        Backward needs twice what forward does. A causal mask leaves half of the scores; each takes 2 D to make and 2 D
        to use. Source: A. Chowdhery et al., PaLM, 2022, appendix B.
        """
        config = self.config
        of_products = config.dim * (2 * config.dim + 2 * config.n_kv_heads * config.head_dim + 3 * config.hidden_dim)
        weights = config.n_layers * of_products + config.dim * config.vocab_size
        of_attention = config.n_layers * 4 * config.dim * config.context / 2
        return 3 * self.tokens * (2 * weights + of_attention)

    def rates(self, device: Device, seconds: float) -> dict[str, float]:
        """Of products of the model's shapes, the best of which is the device's."""
        config = self.config
        own = [(self.tokens, config.dim, config.hidden_dim), (self.tokens, config.hidden_dim, config.dim)]
        shapes = [*own, *self.shapes]
        return {" x ".join(map(str, shape)): device.rate(*shape, seconds / len(shapes)) for shape in shapes}

    def batches(self, count: int, device: Device) -> DataLoader:
        return DataLoader(Repeated(self.config, self.batch * count), self.batch, pin_memory=device.is_gpu)


class Repeated(Dataset):
    """One sequence, as often as it is asked for: loading must not be what is measured."""

    def __init__(self, config: GPTConfig, samples: int) -> None:
        ids = torch.randint(config.vocab_size, (config.context + 1,), generator=torch.Generator().manual_seed(0))
        self.sample, self.samples = {"input_ids": ids[:-1], "labels": ids[1:]}, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.sample


SIZES = {
    "gpt-1b": Job("gpt-1b", batch=8, steps=10, warm_up=4, chunks=8, shapes=((8192, 8192, 8192),)),
    "nano": Job("gpt-nano", batch=2, steps=2, warm_up=2, chunks=4, shapes=((64, 64, 64),)),
}
