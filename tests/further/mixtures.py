"""Our GPT with experts, balanced in each way."""

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule

from tests.models import OWN, MakeOptimizer, owned


def own_moe(optimizer: MakeOptimizer | None = None, **overrides: Any) -> LightningModule:
    from recipes.moe import MoEModule

    experts = {"n_experts": 8, "top_k": 2, "expert_dim": 16, "n_shared": 1, "dense_layers": 1}
    return owned(MoEModule, optimizer)(OWN | experts | overrides, learning_rate=1e-2, warmup_steps=2)


GROUPED = {"score": "sigmoid", "n_groups": 4, "top_groups": 2, "group_experts": 2, "scaling": 2.5}

MODELS = {
    "moe": partial(own_moe, balance="none"),
    "moe aux": partial(own_moe, balance="aux", z_weight=0.01),
    "moe bias": partial(own_moe, balance="bias", bias_rate=0.01, **GROUPED),
}
