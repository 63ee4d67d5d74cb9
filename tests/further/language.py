"""Language models as users write them, and all that users do with logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import SumMetric
from torchmetrics.text import Perplexity

from tests.models import IGNORED, VOCABULARY, LanguageModel, Optimized, adamw, llama


class ManyUses(LanguageModel):
    """Does with logits what users do."""

    def __init__(self) -> None:
        super().__init__(llama(num_hidden_layers=2), adamw)
        self.seen = SumMetric()
        self.perplexity = Perplexity(ignore_index=IGNORED)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.network(input_ids=batch["input_ids"]).logits, batch["labels"]
        weight = torch.linspace(0.5, 2, logits.shape[-1])
        smooth = F.cross_entropy(logits.transpose(1, 2), labels, weight=weight, label_smoothing=0.1)
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


class Weighted(LanguageModel):
    """A cross-entropy of smoothed labels with weights of classes."""

    def __init__(self) -> None:
        super().__init__(llama(num_hidden_layers=2))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = self.network(input_ids=batch["input_ids"]).logits, batch["labels"]
        weight = torch.linspace(0.5, 2, logits.shape[-1])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight, label_smoothing=0.1)


# ---------------------------------------------------------------- blocks


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


class Numbered(nn.Module):
    """Returns its hidden state behind something else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(()), x + self.down(self.inner(self.up(self.moved(self.norm(x)))))

    def moved(self, x: Tensor) -> Tensor:
        return x

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Shifting(Numbered):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[1]

    def moved(self, x: Tensor) -> Tensor:
        return torch.cat((x[:, :1], x[:, :-1]), 1)


# ---------------------------------------------------------------- models


class Written(LanguageModel):
    """An embedding, blocks, and a head."""

    def __init__(self, block: Callable[[], nn.Module], blocks: int = 2) -> None:
        super().__init__(nn.Module(), adamw)
        self.network.embed, self.network.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.network.blocks = nn.ModuleList(block() for _ in range(blocks))

    def through(self, x: Tensor) -> Tensor:
        for block in self.network.blocks:
            x = block(x)
        return x

    def score(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network.head(x).flatten(0, 1), labels.flatten())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.score(self.through(self.network.embed(batch["input_ids"])), batch["labels"])


class Between(Written):
    """Does between blocks what needs the whole sequence, and looks at what each of them returned."""

    def __init__(self) -> None:
        super().__init__(Numbered, blocks=4)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        states = [self.network.embed(batch["input_ids"])]
        for block, norm in zip(self.network.blocks, self.norms, strict=True):
            _, x = block(states[-1])
            states.append(norm(x - x.mean(1, keepdim=True)) if block is self.network.blocks[1] else x)
        seen = sum(state.mean(1).square().mean() for state in states)
        return self.score(self.norms[0](states[-1]) + states[2], batch["labels"]) + seen


class Recomputing(Written):
    """Checkpoints of torch's around blocks, of both kinds."""

    def __init__(self) -> None:
        super().__init__(Shifting, blocks=4)
        for block in self.network.blocks:
            block.moved = nn.Identity()

    def through(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.network.blocks):
            x = checkpoint(block, x, use_reentrant=number < 2) if self.training else block(x)
        return x


class OutOfBounds(Written):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss({**batch, "input_ids": batch["input_ids"] + VOCABULARY})


class Encoding(Written):
    """Torch's own layers, which evaluate in one kernel where they can."""

    def __init__(self) -> None:
        super().__init__(Shifting, blocks=1)
        layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)
        self.network.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        padded = (torch.arange(ids.shape[1]) > 12).expand_as(ids)
        x = self.network.blocks(self.network.embed(ids), src_key_padding_mask=padded)
        return self.score(x[:, :12], batch["labels"][:, :12])


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
    "weighted": Weighted,
    "many uses": ManyUses,
    "unknown": Unknown,
    "hard coded": partial(Written, HardCoded),
    "shifting": partial(Written, Shifting),
    "between": Between,
    "recomputing": Recomputing,
    "out of bounds": partial(OutOfBounds, Shifting),
    "encoding": Encoding,
}
