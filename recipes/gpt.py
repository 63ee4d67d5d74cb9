"""A GPT in the style of Llama, small enough to read in one sitting, and its LightningModule.

Shapes in comments: B samples, T positions, C model width, H heads, K key/value heads, D width of a head, V vocabulary.
Nothing here knows about ranks: the strategy given to the Trainer decides how it is divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_parallel.checkpoint.hub import HubState
from recipes import checks, hub
from recipes.losses import IGNORED, cross_entropy


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        vocab_size: Number of token ids.
        context: Longest sequence it is trained on; positions are rotary, so no weight depends on it.
        dim: Width of the hidden state.
        n_layers: Number of blocks.
        n_heads: Number of query heads.
        n_kv_heads: Number of key/value heads, each shared by ``n_heads / n_kv_heads`` query heads.
        hidden_dim: Inner width of the SwiGLU feed-forward.
        tied_head: Whether the output head is the embedding's own weight.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        qk_norm: Whether queries and keys are normalised head by head, as in Qwen3.
    """

    vocab_size: int
    context: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    tied_head: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim"):
            checks.whole(1, **{name: getattr(self, name)})
        checks.flag(tied_head=self.tied_head, qk_norm=self.qk_norm)
        checks.number(1, rope_theta=self.rope_theta)
        checks.number(0, norm_eps=self.norm_eps)
        if self.dim % (2 * self.n_heads):
            choices = [n for n in _divisors(self.dim) if self.dim // n % 2 == 0]
            raise ValueError(
                f"n_heads={self.n_heads} does not divide dim={self.dim} into heads of even width "
                f"(rotary positions turn pairs); choose one of {choices}"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}; "
                f"choose one of {_divisors(self.n_heads)}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


class Linear(nn.Linear):
    """A linear map without bias whose weight starts normal with a chosen deviation."""

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        self.std = std  # before nn.Linear's constructor, which already calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """A token embedding whose rows start normal with deviation 0.02."""

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=0.02)


class Rotary(nn.Module):
    """Turns positions into the angles by which queries and keys are rotated; it has no weights."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, (..., T, 1, D/2), for positions (..., T)."""
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device).double() / self.head_dim
        angles = positions[..., None, None] * self.theta**-exponents
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + D/2) of the heads ``x`` (B, T, H, D) by its position's angle."""
    exact = torch.promote_types(x.dtype, torch.float32)  # low precision would blur the angles
    cos, sin = (part.to(exact) for part in rotary)
    left, right = x.to(exact).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.n_kv_heads != config.n_heads
        self.q_proj = Linear(config.dim, config.n_heads * config.head_dim)
        self.k_proj = Linear(config.dim, config.n_kv_heads * config.head_dim)
        self.v_proj = Linear(config.dim, config.n_kv_heads * config.head_dim)
        self.o_proj = Linear(config.n_heads * config.head_dim, config.dim, std=residual_std(config))
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        """Let every position of ``x`` (B, T, C) look at itself and those before it, or where ``mask`` lets it."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)  # (B, T, H, D)
        k = rotate(self.k_norm(self._heads(self.k_proj(x))), rotary)  # (B, T, K, D)
        v = self._heads(self.v_proj(x))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, D)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.grouped)
        projected: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        # The number of heads is inferred, so that it may differ between ranks that each hold some of them.
        return x.view(*x.shape[:-1], -1, self.head_dim)


class FeedForward(nn.Module):
    """SwiGLU: one projection gates another."""

    def __init__(self, config: GPTConfig, hidden_dim: int | None = None) -> None:
        super().__init__()
        hidden_dim = hidden_dim or config.hidden_dim
        self.gate_proj = Linear(config.dim, hidden_dim)
        self.up_proj = Linear(config.dim, hidden_dim)
        self.down_proj = Linear(hidden_dim, config.dim, std=residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (B, T, C) position by position."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """Attention, then feed-forward, each normalised before and added to the hidden state after."""

    def __init__(self, config: GPTConfig, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = feed_forward or FeedForward(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        """Map the hidden state ``x`` (B, T, C) to the next one."""
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


def residual_std(config: GPTConfig) -> float:
    """Return the deviation of weights that end a branch."""
    # 2 * n_layers branches add up in the hidden state; scaled like this their sum keeps its variance with depth.
    return 0.02 / math.sqrt(2 * config.n_layers)


class GPT(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.dim)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.blocks = nn.ModuleList(self.make_block(layer) for layer in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, config.vocab_size)
        self.tie_weights()

    def make_block(self, layer: int) -> nn.Module:
        """Return block number ``layer``."""
        return Block(self.config)

    def tie_weights(self) -> None:
        """Make the head the embedding, where the config says so; to be repeated after ``to_empty``, which unties."""
        if self.config.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) for ids (B, T).

        ``position_ids`` (T) or (B, T) default to 0, 1, 2, …. ``documents`` (B, T) numbers the documents that are packed
        into a sequence: no token looks at another one's.
        """
        logits: Tensor = self.head(self.hidden(input_ids, position_ids, documents))  # (B, T, V)
        return logits

    def hidden(self, input_ids: Tensor, position_ids: Tensor | None, documents: Tensor | None) -> Tensor:
        """Return what the head maps to logits, (B, T, C)."""
        x, *places = self.enter(input_ids, position_ids, documents)
        for block in self.blocks:
            x = block(x, *places)
        normalised: Tensor = self.norm(x)
        return normalised

    def enter(
        self, input_ids: Tensor, position_ids: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor | None]:
        """Return what the first block is given: the hidden state (B, T, C), rotary angles, and where to look."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids)
        rotary = self.rotary(position_ids)
        return x, rotary, None if documents is None else within_documents(documents)


def within_documents(documents: Tensor) -> Tensor:
    """Return where a query may look, (B, 1, T, T): at positions of its own document that are not after it."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return causal & (documents[:, None, None, :] == documents[:, None, :, None])


class Perplexity(MeanMetric):
    """The exponential of a mean loss."""

    def compute(self) -> Tensor:
        """Return exp(mean)."""
        return super().compute().exp()


def warmup_cosine(step: int, warmup: int, total: float, final: float) -> float:
    """Return the share of the peak learning rate at ``step``."""
    if step < warmup:  # 1. linear warmup, never zero
        return (step + 1) / (warmup + 1)
    if step >= total:  # 2. past the end, the final rate
        return final
    progress = (step - warmup) / max(1, total - warmup)  # 3. half a cosine between the two
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def inputs_of(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what the network is given of a batch."""
    return batch["input_ids"], batch.get("position_ids"), batch.get("documents")


class GPTModule(LightningModule):
    """Trains a GPT on batches of ``input_ids`` and ``labels`` (the ids one step ahead).

    A batch may have ``position_ids``, and ``documents`` that are packed into its sequences: see ``GPT.forward``.

    Args:
        config: The network's shape, as a GPTConfig (of the class ``config_class``) or its fields.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Decay of matrices; gains of norms are never decayed.
        betas: AdamW's decay rates.
        warmup_steps: Optimizer steps until the peak.
        final_lr: The last learning rate, as a share of the peak.
        fused: Whether AdamW runs its fused kernel.
        loss_chunks: Into how many parts tokens are divided, whose logits do not exist at once; see ``cross_entropy``.
    """

    config_class: type[GPTConfig] = GPTConfig
    network_class: type[GPT] = GPT

    def __init__(
        self,
        config: GPTConfig | Mapping[str, Any],
        *,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 100,
        final_lr: float = 0.1,
        fused: bool = False,
        loss_chunks: int = 1,
    ) -> None:
        super().__init__()
        checks.number(0, learning_rate=learning_rate, weight_decay=weight_decay, final_lr=final_lr)
        checks.number(0, 1, betas__0=betas[0], betas__1=betas[1])
        checks.whole(0, warmup_steps=warmup_steps)
        checks.whole(1, loss_chunks=loss_chunks)
        checks.flag(fused=fused)
        self.config = config if isinstance(config, GPTConfig) else self.config_class(**config)
        self.save_hyperparameters(ignore="config")
        # Plain values, so that a checkpoint can be read without running code from it.
        self.save_hyperparameters({"config": asdict(self.config)})
        self.loss_chunks = loss_chunks  # a module made of this one may have other arguments, and so hyperparameters
        self.network: GPT | None = None
        self.val_loss = MeanMetric()
        self.val_perplexity = Perplexity()

    def configure_model(self) -> None:
        """Build the network here and not in the constructor, so that a strategy can build it without memory first."""
        if self.network is None:
            self.network = self.network_class(self.config)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let a run start from a Hugging Face folder of a model that is computed as this one."""
        if isinstance(state := checkpoint["state_dict"], HubState) and self.network is not None:
            checkpoint["state_dict"] = hub.weights_for(state, self.network, asdict(self.config))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V)."""
        assert self.network is not None, "configure_model has not run"
        logits: Tensor = self.network(input_ids, position_ids, documents)
        return logits

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.network is not None, "configure_model has not run"
        return self._cross_entropy(self.network.hidden(*inputs_of(batch)), batch)

    def _cross_entropy(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
        assert self.network is not None, "configure_model has not run"
        return cross_entropy(x, self.network.head, batch["labels"], self.loss_chunks)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the batch's tokens."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add the batch to the validation loss and perplexity, each token weighing the same."""
        loss, tokens = self._loss(batch), (batch["labels"] != IGNORED).sum()
        self.val_loss.update(loss, tokens)
        self.val_perplexity.update(loss, tokens)
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_perplexity", self.val_perplexity)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW with warmup and cosine decay over the run's optimizer steps."""
        chosen, total = self.hparams, self.trainer.estimated_stepping_batches
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": chosen["weight_decay"]},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (chosen["betas"][0], chosen["betas"][1])
        optimizer = torch.optim.AdamW(groups, lr=chosen["learning_rate"], betas=betas, fused=chosen["fused"])
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, chosen["warmup_steps"], total, chosen["final_lr"])
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
