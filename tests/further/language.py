"""Language models as users write them, and all that users do with logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import SumMetric
from torchmetrics.text import Perplexity

from tests.models import IGNORED, VOCABULARY, LanguageModel, Optimized, adamw, llama


class ManyUses(LanguageModel):
    """Does with logits what users do."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network, adamw)
        self.seen = SumMetric()
        self.perplexity = Perplexity(ignore_index=IGNORED)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.network(input_ids=batch["input_ids"]).logits, batch["labels"]
        smooth = F.cross_entropy(
            logits.transpose(1, 2), labels, weight=torch.linspace(0.5, 2, logits.shape[-1]), label_smoothing=0.1
        )
        shifted = F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].flatten(), reduction="sum")
        z_loss = logits.float().logsumexp(-1).square().mean()
        log_probabilities = F.log_softmax(logits / 2, -1).gather(-1, labels.clamp(min=0)[..., None]).mean()
        if self.training:
            self.look_at(logits, labels)
        return smooth + 1e-3 * shifted + 1e-2 * z_loss - 0.1 * log_probabilities

    def look_at(self, logits: Tensor, labels: Tensor) -> None:
        self.log("accuracy", (logits.argmax(-1) == labels).float().mean())
        self.log("largest", logits.detach().amax())
        self.seen.update(float(len(labels)))
        self.perplexity.update(logits.detach(), labels)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("perplexity", self.perplexity, on_step=False, on_epoch=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network(input_ids=batch["input_ids"]).logits


class HardCoded(nn.Module):
    """Attention that knows how many heads there are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))
        self.o_proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).view(*y.shape[:2], 4, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


class Written(LanguageModel):
    def __init__(self, block: Callable[[], nn.Module], blocks: int = 2) -> None:
        super().__init__(nn.Module(), adamw)
        self.network.embed, self.network.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.network.blocks = nn.ModuleList(block() for _ in range(blocks))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.network.embed(batch["input_ids"])
        for block in self.network.blocks:
            x = block(x)
        return F.cross_entropy(self.network.head(x).flatten(0, 1), batch["labels"].flatten())


class Counting(HardCoded):
    """The same, from an attribute, with queries that are normalised between the maps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(y) for f in maps)
        q, k, v = (part.view(*part.shape[:2], self.num_heads, -1).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


class MixesPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) - x.mean(1, keepdim=True)


class Unknown(Optimized):
    def __init__(self) -> None:
        super().__init__()
        self.make_optimizer = adamw
        self.only = nn.Conv1d(1, 1, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.only(batch["labels"][:, None].float()).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


MODELS = {
    "many uses": lambda **_: ManyUses(llama(num_hidden_layers=2)),
    "hard coded": lambda **_: Written(HardCoded),
    "counting": lambda **_: Written(Counting),
    "mixes positions": lambda **_: Written(MixesPositions),
    "unknown": lambda **_: Unknown(),
}
