"""A GPT in the style of Llama, small enough to read in one sitting, and its LightningModule.

Shapes in comments: B samples, T positions, C model width, H heads, K key/value heads, D width of a head, V vocabulary.
Nothing here knows about ranks: the strategy of the Trainer divides the model.
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
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

import lightning_parallel as lp
from lightning_parallel.checkpoint.hub import HubState
from recipes import checks, hub

IGNORED = -100  # the label of a position without a target


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
        """Draw the weight again."""
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """A token embedding whose rows start normal with deviation 0.02."""

    def reset_parameters(self) -> None:
        """Draw the weight again."""
        nn.init.normal_(self.weight, std=0.02)


class Rotary(nn.Module):
    """Computes the angles by which queries and keys are rotated from their positions; it has no weights."""

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
        """Attend from every position of ``x`` (B, T, C) to itself and those before it, or to those of ``mask``."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)  # (B, T, H, D)
        k = rotate(self.k_norm(self._heads(self.k_proj(x))), rotary)  # (B, T, K, D)
        v = self._heads(self.v_proj(x))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, D)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.grouped)
        projected: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))  # (B, T, C)
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        # (B, T, heads * D) to (B, T, heads, D). The number of heads is inferred: a rank may hold only some of them.
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
    """Attention, then feed-forward, each on the normalised hidden state and added to it."""

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
    """Return the initial standard deviation of the last weight of a branch."""
    # 2 * n_layers branches are added to the hidden state; with this scale the variance of the sum is that of one.
    return 0.02 / math.sqrt(2 * config.n_layers)


class GPT(nn.Module):
    """Returns the logits of the next tokens for token ids."""

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
        """Share the weight of the embedding with the head, if ``tied_head``; call it again after ``to_empty``."""
        if self.config.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T); for the arguments see ``hidden``."""
        logits: Tensor = self.head(self.hidden(input_ids, position_ids, documents)[0])
        return logits

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor | None = None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the input of the head, (B, T, C), and the statistics of the routers if the model has experts.

        Args:
            input_ids: Ids (B, T).
            position_ids: Positions (T) or (B, T); None means 0, 1, 2, ….
            documents: Number of each position's document (B, T), where several documents are packed into a sequence. A
                position then attends to its own document only.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = None
        if documents is not None:
            length = documents.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
            mask = causal & (documents[:, None, None, :] == documents[:, None, :, None])  # (B, 1, T, T)
        x, routing = self.run_blocks(self.embed(input_ids), self.rotary(position_ids), mask)
        return self.norm(x), routing

    def run_blocks(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the hidden state (B, T, C) after all blocks, and the statistics of the routers."""
        for block in self.blocks:
            x = block(x, rotary, mask)
        return x, None


def cross_entropy(x: Tensor, head: nn.Module, labels: Tensor, chunks: int = 1) -> Tensor:
    """Return the mean cross-entropy over the labels that are not ignored, in single precision or better.

    Args:
        x: Normalised hidden state (B, T, C).
        head: Maps the hidden state to logits.
        labels: Ids of the next tokens (B, T), or ``IGNORED``.
        chunks: Number of parts into which the tokens are divided. With more than one, the logits of one part at a time
            exist, in forward and in backward. This saves most of the memory of a small model with a large vocabulary
            and costs one more forward of the head.
    """

    def loss_of(rows: Tensor, targets: Tensor, reduction: str) -> Tensor:
        logits = head(rows)  # (N, V)
        exact = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(exact), targets, ignore_index=IGNORED, reduction=reduction)

    rows, targets = x.flatten(0, 1), labels.flatten()  # (N, C) and (N), where N = B * T
    if chunks == 1:
        return loss_of(rows, targets, "mean")
    parts = zip(rows.chunk(chunks), targets.chunk(chunks), strict=True)
    sums = [checkpoint(loss_of, *part, "sum", use_reentrant=False, preserve_rng_state=False) for part in parts]
    return lp.mean(torch.stack(sums).sum(), (targets != IGNORED).sum())


def warmup_cosine(step: int, warmup: int, total: float, final: float) -> float:
    """Return the learning rate at ``step``, relative to the peak."""
    if step < warmup:  # linear warmup, never zero
        return (step + 1) / (warmup + 1)
    if step >= total:
        return final
    progress = (step - warmup) / max(1, total - warmup)  # half a cosine between peak and final rate
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


class GPTModule(LightningModule):
    """Trains a GPT on batches of ``input_ids`` and ``labels`` (the ids one step ahead).

    A batch may also have ``position_ids`` and ``documents``; see ``GPT.hidden``.

    Args:
        config: The network's shape, as a GPTConfig (of the class ``config_class``) or its fields.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Decay of matrices; gains of norms are never decayed.
        betas: AdamW's decay rates.
        warmup_steps: Optimizer steps until the peak.
        final_lr: The last learning rate, as a share of the peak.
        fused: Whether AdamW runs its fused kernel.
        loss_chunks: Number of parts of the tokens whose logits exist one after the other; see ``cross_entropy``.
    """

    config_class: type[GPTConfig] = GPTConfig
    network_class: type[GPT] = GPT
    network: GPT  # None until configure_model

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
        # Plain values, so that a checkpoint can be read without running code.
        self.save_hyperparameters({"config": asdict(self.config)})
        self.loss_chunks = loss_chunks  # not from hparams: a subclass may have other arguments
        self.network = None  # type: ignore[assignment]
        self.val_loss = MeanMetric()

    def configure_model(self) -> None:
        """Build the network here and not in the constructor, so that the strategy can shard parameters at once."""
        if self.network is None:
            self.network = self.network_class(self.config)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Rename the weights of a Hugging Face folder whose model computes the same, if ``ckpt_path`` is one."""
        if isinstance(state := checkpoint["state_dict"], HubState) and self.network is not None:
            checkpoint["state_dict"] = hub.weights_for(state, self.network, asdict(self.config))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V)."""
        logits: Tensor = self.network(input_ids, position_ids, documents)
        return logits

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss of the batch's tokens, and the statistics of the routers if the model has experts."""
        x, routing = self.network.hidden(batch["input_ids"], batch.get("position_ids"), batch.get("documents"))
        return cross_entropy(x, self.network.head, batch["labels"], self.loss_chunks), routing

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the batch's tokens."""
        loss, _ = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add the batch to the validation loss, in which every token has the same weight."""
        self.val_loss.update(self._loss(batch)[0], (batch["labels"] != IGNORED).sum())
        self.log("val_loss", self.val_loss, prog_bar=True)

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
