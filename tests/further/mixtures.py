"""Our GPT with experts, balanced in each way."""

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule

from tests.models import VOCABULARY, MakeOptimizer, Optimized


def own_moe(optimizer: MakeOptimizer | None = None, **overrides: Any) -> LightningModule:
    """Ours; with its own optimizer unless another one is asked for."""
    from recipes.moe import MoEModule

    class OwnMoE(MoEModule):
        def configure_optimizers(self) -> Any:
            if optimizer is None:
                return super().configure_optimizers()
            self.make_optimizer = optimizer
            return Optimized.configure_optimizers(self)

    sizes = {"vocab_size": VOCABULARY, "context": 64, "dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2}
    experts = {"n_experts": 8, "top_k": 2, "expert_dim": 16, "n_shared": 1, "dense_layers": 1, "hidden_dim": 64}
    return OwnMoE(sizes | experts | overrides, learning_rate=1e-2, warmup_steps=2)


GROUPED = {"score": "sigmoid", "n_groups": 4, "top_groups": 2, "group_experts": 2, "scaling": 2.5}

MODELS = {
    "moe": partial(own_moe, balance="none"),
    "moe aux": partial(own_moe, balance="aux", z_weight=0.01),
    "moe bias": partial(own_moe, balance="bias", bias_rate=0.01, **GROUPED),
}
