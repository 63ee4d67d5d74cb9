"""The GPT of ``recipes/gpt.py`` with mixtures of experts instead of feed-forwards, and its LightningModule.

More shapes in comments: N tokens (B * T), E experts, K experts per token, L layers with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_parallel import ParallelPlan
from recipes import checks
from recipes.gpt import GPT, Block, FeedForward, GPTConfig, GPTModule, residual_std

Score = Literal["softmax", "sigmoid"]
Balance = Literal["aux", "bias", "none"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig(GPTConfig):
    """The shape of a GPT with experts.

    Attributes:
        n_experts: Number of routed experts in a layer.
        top_k: Number of experts per token.
        expert_dim: Inner width of an expert.
        n_shared: Number of shared experts, which get all tokens; they are one feed-forward, so many times as wide.
        dense_layers: Number of first layers with an ordinary feed-forward, ``hidden_dim`` wide.
        score: Router scores: ``softmax`` over the experts, or ``sigmoid`` of each.
        normalised: Whether the weights of a token's experts are divided by their sum.
        scaling: Factor of these weights.
        n_groups: Number of groups of experts, for example one per node.
        top_groups: Number of groups from which a token chooses its experts.
        group_experts: A group's score is the sum of this many of its best experts.
        balance: Keeps loads equal by a loss (Switch Transformer), by a bias of the choice (DeepSeek-V3), or not.
        balance_weight: Weight of the ``aux`` loss.
        bias_rate: Change of the bias per step.
        z_weight: Weight of the loss that keeps the router's logits small (ST-MoE).
    """

    n_experts: int
    top_k: int
    expert_dim: int
    n_shared: int = 0
    dense_layers: int = 0
    score: Score = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    group_experts: int = 1
    balance: Balance = "aux"
    balance_weight: float = 0.01
    bias_rate: float = 0.001
    z_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n_experts", "top_k", "expert_dim", "n_groups", "top_groups", "group_experts"):
            checks.whole(1, **{name: getattr(self, name)})
        checks.whole(0, n_shared=self.n_shared, dense_layers=self.dense_layers)
        checks.flag(normalised=self.normalised)
        checks.number(0, scaling=self.scaling, balance_weight=self.balance_weight, bias_rate=self.bias_rate)
        checks.number(0, z_weight=self.z_weight)
        checks.choice(get_args(Score), score=self.score)
        checks.choice(get_args(Balance), balance=self.balance)
        if self.n_experts % self.n_groups:
            raise checks.ConfigurationError(
                f"n_groups={self.n_groups} does not divide n_experts={self.n_experts} into equal groups"
            )
        size = self.n_experts // self.n_groups
        for name, most, rule in (
            ("dense_layers", self.n_layers - 1, "layers but one"),
            ("top_groups", self.n_groups, "groups"),
            ("group_experts", size, "experts of a group"),
            ("top_k", self.top_groups * size, "experts that a token can choose from"),
        ):
            if (value := getattr(self, name)) > most:
                raise checks.ConfigurationError(f"{name}={value} is more than there are {rule}; choose {most} or less")


class Router(nn.Module):
    """Chooses experts for each token."""

    correction: Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        # Added to the scores for the choice only, not to the weights: it moves load and has no gradient. Models of
        # transformers with sigmoid scores have it however they are balanced.
        corrected = config.balance == "bias" or config.score == "sigmoid"
        self.register_buffer("correction", torch.empty(config.n_experts) if corrected else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight again."""
        nn.init.normal_(self.weight, std=0.02)
        if self.correction is not None:
            nn.init.zeros_(self.correction)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's experts and their weights, both (B, T, K), and each sample's statistics (B, 2E + 2).

        The statistics are the share of the pairs of token and expert that each expert has (E), the mean probability of
        each expert (E), the mean entropy of the probabilities, and the mean square of the logsumexp of the logits.
        """
        config, exact = self.config, torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):  # low precision would swap experts with close scores
            logits = F.linear(x.to(exact), self.weight.to(exact))  # (B, T, E)
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        index = self._choose(scores.detach())
        weights = scores.gather(-1, index)
        if config.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        fraction = torch.zeros_like(scores).scatter(-1, index, 1.0).mean(-2) / config.top_k
        probabilities = scores / scores.sum(-1, keepdim=True)
        entropy, z = torch.special.entr(probabilities).sum(-1).mean(-1), logits.logsumexp(-1).square().mean(-1)
        statistics = torch.cat((fraction, probabilities.mean(-2), entropy[:, None], z[:, None]), -1)
        return index, weights * config.scaling, statistics

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the experts (B, T, K) with the highest scores (B, T, E), in groups with the highest scores."""
        config = self.config
        scores = scores if self.correction is None else scores + self.correction
        if config.n_groups > 1:
            groups = scores.view(*scores.shape[:-1], config.n_groups, -1)  # (B, T, groups, E / groups)
            best = groups.topk(config.group_experts, dim=-1).values.sum(-1)  # (B, T, groups)
            barred = torch.ones_like(best).scatter(-1, best.topk(config.top_groups, dim=-1).indices, 0.0)
            scores = groups.masked_fill(barred[..., None].bool(), -torch.inf).flatten(-2)
        return scores.topk(config.top_k, dim=-1).indices

    @torch.no_grad()
    def correct(self, pairs: Tensor) -> None:
        """Lower the bias of experts with more than an equal share of ``pairs`` (E), and raise that of the others."""
        if self.correction is not None and self.config.balance == "bias":
            missing = pairs.sum() - len(pairs) * pairs
            self.correction += self.config.bias_rate * missing.sign().to(self.correction)


class Experts(nn.Module):
    """Stacked feed-forwards, each of which maps the tokens that chose it."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.std = residual_std(config)
        self.gate_up_proj = nn.Parameter(torch.empty(config.n_experts, 2 * config.expert_dim, config.dim))
        self.down_proj = nn.Parameter(torch.empty(config.n_experts, config.dim, config.expert_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        nn.init.normal_(self.gate_up_proj, std=0.02)
        nn.init.normal_(self.down_proj, std=self.std)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return for tokens ``x`` (N, C) the sum of their experts ``index`` (N, K), weighted by ``weights`` (N, K)."""
        chosen, order = index.flatten().sort(stable=True)  # pairs of token and expert, by experts (N * K)
        numbers = torch.arange(len(self.down_proj), device=index.device)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)  # where each expert's pairs end
        pairs = x.index_select(0, order // index.shape[1])
        y = self._grouped(pairs, ends) if self._is_groupable(pairs) else self._looped(pairs, ends)
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        y = y.index_select(0, place).view(*index.shape, x.shape[1])  # (N, K, C)
        return (weights.to(y.dtype)[..., None] * y).sum(1, dtype=y.dtype)

    def _is_groupable(self, x: Tensor) -> bool:
        """Return whether torch has a grouped product for such rows: the widths are multiples of 16 bytes."""
        dtype = _computed_in(x)
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return False
        if torch.compiler.is_compiling() and dtype != torch.bfloat16:  # no other has a rule for shapes
            return False
        widths = self.down_proj.shape[1:]
        # Meta tensors are on neither device; the loop infers their shapes for any dtype.
        known = x.is_cpu or (x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0))
        return known and not any(width * dtype.itemsize % 16 for width in widths)

    def _grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        x = x.to(_computed_in(x))  # autocast does not know this product
        gate_up, down = self.gate_up_proj.to(x.dtype), self.down_proj.to(x.dtype)
        gate, up = F.grouped_mm(x, gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, down.transpose(-2, -1), offs=ends)

    def _looped(self, x: Tensor, ends: Tensor) -> Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = []
        for i, rows in enumerate(torch.split(x, counts)):
            if len(rows):
                gate, up = F.linear(rows, self.gate_up_proj[i]).chunk(2, dim=-1)
                parts.append(F.linear(F.silu(gate) * up, self.down_proj[i]))
        return torch.cat(parts) if parts else x


def _computed_in(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class MixtureOfExperts(nn.Module):
    """A feed-forward of routed and shared experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = FeedForward(config, config.n_shared * config.expert_dim) if config.n_shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``x`` (B, T, C) position by position; return also the router's statistics (B, 2E + 2)."""
        index, weights, statistics = self.router(x)
        y = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1)).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, statistics


class MoEBlock(Block):
    """Attention, then a mixture of experts.

    The statistics of the routers pass from block to block beside the hidden state, one row per sample. So they reach
    the loss on any layout, a recomputed block counts once, and means over samples are exact.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, MixtureOfExperts(config))

    def forward(  # type: ignore[override]
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, routing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Map the hidden state ``x`` (B, T, C) to the next one, and add a layer to ``routing`` (B, L, 2E + 2)."""
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        y, statistics = self.feed_forward(self.feed_forward_norm(x))
        return x + y, torch.cat((routing, statistics[:, None]), dim=1)


class MoEGPT(GPT):
    """Returns the logits of the next tokens for token ids, as a GPT does, and the statistics of its routers."""

    config: MoEConfig

    def make_block(self, layer: int) -> nn.Module:
        """Return block number ``layer``."""
        return super().make_block(layer) if layer < self.config.dense_layers else MoEBlock(self.config)

    def run_blocks(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the hidden state (B, T, C) after all blocks, and the statistics of the routers (B, L, 2E + 2)."""
        exact = torch.promote_types(x.dtype, torch.float32)
        routing = torch.zeros(len(x), 0, 2 * self.config.n_experts + 2, dtype=exact, device=x.device)
        for layer, block in enumerate(self.blocks):
            if layer < self.config.dense_layers:
                x = block(x, rotary, mask)
            else:
                x, routing = block(x, rotary, mask, routing)
        return x, routing


def means(routing: Tensor) -> tuple[Tensor, ...]:
    """Return fraction and probability (L, E), entropy and z (L, 1): the means of ``routing`` (B, L, 2E + 2) over B."""
    experts = routing.shape[2] // 2 - 1
    return torch.split(routing.mean(0), [experts, experts, 1, 1], dim=1)


class BalanceLoss(nn.Module):
    """How unequally experts are loaded.

    It is not a mean over samples, so the plan names this module as one that gets the whole batch of all ranks.
    """

    def forward(self, routing: Tensor) -> Tensor:
        """Return Σ fraction · probability · E for each layer (L): 1 where experts are equally loaded."""
        fraction, probability, *_ = means(routing)
        return (fraction * probability).sum(1) * fraction.shape[1]


class Pairs(Metric):
    """Counts the pairs of token and expert (L, E), over all ranks that have different samples."""

    full_state_update = False
    pairs: Tensor

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.add_state("pairs", torch.zeros(layers, experts, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, fraction: Tensor, pairs: int) -> None:
        """Add ``pairs`` pairs, of which each expert has its ``fraction`` (L, E)."""
        self.pairs += (fraction * pairs).round().long()

    def compute(self) -> Tensor:
        """Return the pairs of each layer and expert (L, E)."""
        return self.pairs


class MoEModule(GPTModule):
    """Trains a GPT with experts on batches of ``input_ids`` and ``labels``, as ``GPTModule`` does.

    Attributes:
        load: Pairs of token and expert in the last optimizer step (L, E), over all ranks.
    """

    config_class = MoEConfig
    network_class = MoEGPT
    config: MoEConfig

    def __init__(self, config: MoEConfig | Mapping[str, Any], **options: Any) -> None:
        super().__init__(config, **options)
        self.balance_loss = BalanceLoss()
        self.pairs = Pairs(self.config.n_layers - self.config.dense_layers, self.config.n_experts)
        self.load: Tensor | None = None
        self.fraction: Tensor | None = None  # of the last batch (L, E), until it is counted

    def parallel_plan(self) -> ParallelPlan:
        """Name the modules that techniques divide."""
        blocks = "network.blocks.*"
        # Always: a pipeline of microbatches would balance, and count, by one microbatch instead of the batch.
        return ParallelPlan(blocks=blocks, experts=f"{blocks}.feed_forward.experts", whole_batch="balance_loss")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the batch's tokens plus the losses of the routers."""
        loss, routing = self._loss(batch)
        assert routing is not None
        fraction, _, entropy, z = means(routing)
        self.fraction = fraction.detach()
        self.log("train_loss", loss, prog_bar=True)
        self.log("router_entropy", entropy.mean())
        if self.config.balance == "aux":
            unequal = self.balance_loss(routing)
            self.log("balance_loss", unequal.mean())
            # A sum over layers, so that the force on one router does not depend on the number of layers.
            loss = loss + self.config.balance_weight * unequal.sum()
        return loss + self.config.z_weight * z.sum() if self.config.z_weight else loss

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Note the number of pairs in the batch; ``training_step`` may get a microbatch."""
        self.in_batch = batch["input_ids"].numel() * self.config.top_k

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then correct the biases of the routers by the load of all batches of the step."""
        super().optimizer_step(*args, **kwargs)
        self._count()
        # Not in on_train_batch_end: callbacks save checkpoints before that hook of the module runs.
        self.load = self.pairs.compute()
        self.pairs.reset()
        self.log("max_load", (self.load.max(1).values / self.load.float().mean(1)).mean())
        routers = [module for module in self.modules() if isinstance(module, Router)]
        for router, pairs in zip(routers, self.load, strict=True):
            router.correct(pairs)

    def on_train_batch_end(self, *_: Any) -> None:
        """Count the pairs of a batch that is accumulated."""
        self._count()

    def _count(self) -> None:
        # Not in training_step, which in a pipeline runs to its end on the last stage only.
        if self.fraction is not None:
            self.pairs.update(self.fraction, self.in_batch)
            self.fraction = None
