"""What is trained: a model of the recipes, its batches, and how many operations a step needs."""

from __future__ import annotations

from collections.abc import Mapping
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
from tests.benchmarks.gpu.device import Device

CONF = Path(__file__).parents[3] / "conf"


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

    def module(self, kind: type[GPTModule] = GPTModule, **changes: Any) -> GPTModule:
        chosen: Mapping[str, Any] = OmegaConf.to_container(configured(self.model), resolve=True)  # type: ignore[assignment]
        options = {name: value for name, value in chosen.items() if not name.startswith("_") and name != "config"}
        return kind(self.config, **(options | {"fused": True} | changes))

    @property
    def config(self) -> GPTConfig:
        return instantiate(configured(self.model)).config

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

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """The shapes whose rate is the device's."""
        config = self.config
        own = [(self.tokens, config.dim, config.hidden_dim), (self.tokens, config.hidden_dim, config.dim)]
        return [*own, *self.shapes]

    def batches(self, count: int, device: Device) -> DataLoader:
        return DataLoader(Repeated(self.config, self.batch * count), self.batch, pin_memory=device.is_gpu)


def configured(model: str) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [f"model={model}", "output_dir=."]).model


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
