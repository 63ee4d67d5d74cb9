"""The GPT of ``recipes/gpt.py`` with mixtures of experts in place of feed-forwards, and its LightningModule.

Further shapes in comments: N tokens (B * T), E experts, K experts that a token goes to, L layers with experts.
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
from recipes.gpt import GPT, Block, FeedForward, GPTConfig, GPTModule, inputs_of, residual_std

Score = Literal["softmax", "sigmoid"]
Balance = Literal["aux", "bias", "none"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig(GPTConfig):
    """The shape of a GPT with experts.

    Attributes:
        n_experts: Number of experts in a layer, of which each token chooses some.
        top_k: How many it chooses.
        expert_dim: Inner width of an expert.
        n_shared: Number of experts that all tokens go to; they are one feed-forward, so many times as wide.
        dense_layers: Number of layers at the beginning that have an ordinary feed-forward, ``hidden_dim`` wide.
        score: How a router scores experts: against each other (softmax) or each by itself (sigmoid).
        normalised: Whether the weights of a token's experts add up to one.
        scaling: Factor of these weights.
        n_groups: Number of groups of experts that lie together, say on one node.
        top_groups: How many groups a token's experts may be in.
        group_experts: How many of its best experts make the score of a group.
        balance: What keeps loads equal: a loss (Switch Transformer), a bias of the choice (DeepSeek-V3), or nothing.
        balance_weight: Weight of that loss.
        bias_rate: By how much a bias changes in one step.
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
        self._check_groups()

    def _check_groups(self) -> None:
        if self.n_experts % self.n_groups:
            raise checks.ConfigurationError(
                f"n_groups={self.n_groups} does not divide n_experts={self.n_experts} into equal groups"
            )
        size = self.n_experts // self.n_groups
        for name, value, most, rule in (
            ("dense_layers", self.dense_layers, self.n_layers - 1, "layers but one"),
            ("top_groups", self.top_groups, self.n_groups, "groups"),
            ("group_experts", self.group_experts, size, "experts of a group"),
            ("top_k", self.top_k, self.top_groups * size, "experts that a token can choose from"),
        ):
            if value > most:
                raise checks.ConfigurationError(f"{name}={value} is more than there are {rule}; choose {most} or less")

    @property
    def sparse_layers(self) -> int:
        """Number of layers with experts."""
        return self.n_layers - self.dense_layers


class Router(nn.Module):
    """Chooses experts for each token."""

    correction: Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        # Added to scores where experts are chosen, and not to the weights: it moves load, and has no gradient.
        self.register_buffer("correction", torch.empty(config.n_experts) if config.balance == "bias" else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=0.02)
        if self.correction is not None:
            nn.init.zeros_(self.correction)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return for tokens ``x`` (B, T, C) experts and weights (B, T, K), and how tokens are spread (B, 2E + 2)."""
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):  # of two close scores low precision takes the wrong one
            logits = F.linear(x.to(exact), self.weight.to(exact))  # (B, T, E)
        scores = logits.softmax(-1) if self.config.score == "softmax" else logits.sigmoid()
        index = self._choose(scores.detach())
        weights = scores.gather(-1, index)
        if self.config.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        probabilities = scores / scores.sum(-1, keepdim=True)
        entropy, z = torch.special.entr(probabilities).sum(-1).mean(-1), logits.logsumexp(-1).square().mean(-1)
        spread = torch.cat((*load_balancing(probabilities, index), entropy[:, None], z[:, None]), -1)
        return index, weights * self.config.scaling, spread

    def _choose(self, scores: Tensor) -> Tensor:
        config = self.config
        scores = scores if self.correction is None else scores + self.correction
        if config.n_groups > 1:
            groups = scores.view(*scores.shape[:-1], config.n_groups, -1)
            best = groups.topk(config.group_experts, dim=-1).values.sum(-1)  # (B, T, groups)
            barred = torch.ones_like(best).scatter(-1, best.topk(config.top_groups, dim=-1).indices, 0.0)
            scores = groups.masked_fill(barred[..., None].bool(), -torch.inf).flatten(-2)
        return scores.topk(config.top_k, dim=-1).indices

    @torch.no_grad()
    def correct(self, pairs: Tensor) -> None:
        """Make experts with more than their share of ``pairs`` (E) less likely to be chosen, and the others more."""
        if self.correction is not None:
            missing = pairs.sum() - len(pairs) * pairs
            self.correction += self.config.bias_rate * missing.sign().to(self.correction)


def load_balancing(probabilities: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return what fraction (B, E) of a sample's pairs ``index`` (B, T, K) each expert has, and its mean probability."""
    chosen = torch.zeros_like(probabilities).scatter(-1, index, 1.0)
    return chosen.mean(-2) / index.shape[-1], probabilities.mean(-2)


class Experts(nn.Module):
    """Feed-forwards side by side, each of which maps the tokens that chose it."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.std = residual_std(config)
        self.gate_up_proj = nn.Parameter(torch.empty(config.n_experts, 2 * config.expert_dim, config.dim))
        self.down_proj = nn.Parameter(torch.empty(config.n_experts, config.dim, config.expert_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.gate_up_proj, std=0.02)
        nn.init.normal_(self.down_proj, std=self.std)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Map tokens ``x`` (N, C): add what the experts ``index`` (N, K) make of each, with ``weights`` (N, K)."""
        chosen, order = index.flatten().sort(stable=True)  # pairs of token and expert, by experts (N * K)
        numbers = torch.arange(len(self.down_proj), device=index.device)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)  # where each expert's pairs end
        pairs = x.index_select(0, order // index.shape[1])
        y = self._grouped(pairs, ends) if self._is_groupable(pairs) else self._looped(pairs, ends)
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        y = y.index_select(0, place).view(*index.shape, x.shape[1])  # (N, K, C)
        return (weights.to(y.dtype)[..., None] * y).sum(1, dtype=y.dtype)

    def _is_groupable(self, x: Tensor) -> bool:
        """Whether torch multiplies groups of such rows: widths are multiples of 16 bytes, and the device knows how."""
        dtype = _computed_in(x)
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return False
        if torch.compiler.is_compiling() and dtype != torch.bfloat16:  # no other has a rule for shapes
            return False
        widths = self.down_proj.shape[1:]
        # Tensors without values are on neither device; the loop finds their shapes and work for any dtype.
        known = x.is_cpu or (x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0))
        return known and not any(width * dtype.itemsize % 16 for width in widths)

    def _grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        x = x.to(_computed_in(x))  # autocast does not know this product
        gate_up, down = self.gate_up_proj.to(x.dtype), self.down_proj.to(x.dtype)
        gate, up = F.grouped_mm(x, gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, down.transpose(-2, -1), offs=ends)

    def _looped(self, x: Tensor, ends: Tensor) -> Tensor:
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        parts = [self._expert(i, part) for i, part in enumerate(torch.split(x, counts)) if len(part)]
        return torch.cat(parts) if parts else x

    def _expert(self, i: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up_proj[i]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[i])


def _computed_in(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class MixtureOfExperts(nn.Module):
    """A feed-forward of many experts: each token goes to those that a router chooses, and to the shared ones."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = FeedForward(config, config.n_shared * config.expert_dim) if config.n_shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``x`` (B, T, C) position by position; return as well how tokens were spread, of which `Routing` tells."""
        index, weights, spread = self.router(x)
        y = self.experts(x.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1)).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, spread


class MoEBlock(Block):
    """Attention, then a mixture of experts.

    What routers did goes from block to block beside the hidden state, sample by sample: so it reaches the loss wherever
    blocks run, counts once where a block runs twice, and is added up over samples where all of them are.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, MixtureOfExperts(config))

    def forward(  # type: ignore[override]
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, routing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Map the hidden state ``x`` (B, T, C) to the next one, and add a layer to ``routing`` (B, L, 2E + 2)."""
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        y, spread = self.feed_forward(self.feed_forward_norm(x))
        return x + y, torch.cat((routing, spread[:, None]), dim=1)


class Routing:
    """What the routers of a model did with a batch, from what its blocks noted of each sample.

    Attributes:
        fraction: Of the pairs of token and expert, each expert's share (L, E).
        probability: Mean probability of each expert (L, E).
        entropy: Mean entropy of the probabilities of a token (L).
        z: Mean square of the log of the router's sum (L).
    """

    def __init__(self, of_samples: Tensor) -> None:
        experts = of_samples.shape[2] // 2 - 1
        self.fraction = of_samples[..., :experts].mean(0)
        self.probability = of_samples[..., experts:-2].mean(0)
        self.entropy, self.z = (of_samples[..., place].mean(0) for place in (-2, -1))


class BalanceLoss(nn.Module):
    """How unequally experts are loaded: no mean over samples, so all of the batch have to come together here."""

    def forward(self, of_samples: Tensor) -> Tensor:
        """Return Σ fraction · probability · E for each layer (L): 1 where experts are equally loaded."""
        routing = Routing(of_samples)
        return (routing.fraction * routing.probability).sum(1) * routing.fraction.shape[1]


class MoEGPT(GPT):
    """Token ids in, logits of the next token out, and what the routers did."""

    config: MoEConfig

    def make_block(self, layer: int) -> nn.Module:
        """Return block number ``layer``."""
        return super().make_block(layer) if layer < self.config.dense_layers else MoEBlock(self.config)

    def hidden(self, input_ids: Tensor, position_ids: Tensor | None, documents: Tensor | None) -> Tensor:
        """Return what the head maps to logits, (B, T, C)."""
        return self.routed(input_ids, position_ids, documents)[0]

    def routed(self, input_ids: Tensor, position_ids: Tensor | None, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the head maps to logits, (B, T, C), and what `Routing` tells of; see ``GPT.forward``."""
        x, *places = self.enter(input_ids, position_ids, documents)
        exact = torch.promote_types(x.dtype, torch.float32)
        routing = torch.zeros(len(x), 0, 2 * self.config.n_experts + 2, dtype=exact, device=x.device)
        for layer, block in enumerate(self.blocks):
            if layer < self.config.dense_layers:
                x = block(x, *places)
            else:
                x, routing = block(x, *places, routing)
        return self.norm(x), routing


class Pairs(Metric):
    """Counts the pairs of token and expert, of all ranks that read different samples."""

    full_state_update = False
    pairs: Tensor

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.add_state("pairs", torch.zeros(layers, experts, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, fraction: Tensor, pairs: int) -> None:
        """Add the ``fraction`` (L, E) of so many pairs."""
        self.pairs += (fraction * pairs).round().long()

    def compute(self) -> Tensor:
        """Return the pairs of each layer and expert (L, E)."""
        return self.pairs


class MoEModule(GPTModule):
    """Trains a GPT with experts on batches of ``input_ids`` and ``labels``, as ``GPTModule`` does.

    Attributes:
        load: Pairs of token and expert in the last optimizer step, of all ranks, for each layer and expert (L, E).
    """

    config_class = MoEConfig
    network_class = MoEGPT
    config: MoEConfig
    network: MoEGPT | None

    def __init__(self, config: MoEConfig | Mapping[str, Any], **options: Any) -> None:
        super().__init__(config, **options)
        self.balance_loss = BalanceLoss()
        self.pairs = Pairs(self.config.sparse_layers, self.config.n_experts)
        self.load: Tensor | None = None
        self.fraction: Tensor | None = None  # of the batch that was trained on last, until it is counted

    def parallel_plan(self) -> ParallelPlan:
        """Name the parts that techniques act on."""
        blocks = "network.blocks.*"
        return ParallelPlan(blocks=blocks, experts=f"{blocks}.feed_forward.experts", whole_batch="balance_loss")

    def configure_model(self) -> None:
        """Build the network, and remember its routers."""
        super().configure_model()
        self.routers = [module for module in self.modules() if isinstance(module, Router)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the batch's tokens, with the losses on routers."""
        assert self.network is not None, "configure_model has not run"
        x, noted = self.network.routed(*inputs_of(batch))
        loss, routing = self._cross_entropy(x, batch), Routing(noted)
        self.fraction = routing.fraction.detach()
        self.log("train_loss", loss, prog_bar=True)
        self.log("router_entropy", routing.entropy.mean())
        if self.config.balance == "aux":
            unequal = self.balance_loss(noted)
            self.log("balance_loss", unequal.mean())
            # A sum over layers: how strongly a router is balanced does not depend on how many there are.
            loss = loss + self.config.balance_weight * unequal.sum()
        return loss + self.config.z_weight * routing.z.sum() if self.config.z_weight else loss

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Note how many pairs there are in the batch."""
        self.in_batch = batch["input_ids"].numel() * self.config.top_k

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then correct the routers' biases by the load of all batches of the step."""
        super().optimizer_step(*args, **kwargs)
        self._count()
        # Here and not when the batch ends: callbacks save checkpoints before the module's own hook runs.
        self.load = self.pairs.compute()
        self.pairs.reset()
        self.log("max_load", (self.load.max(1).values / self.load.float().mean(1)).mean())
        for router, pairs in zip(self.routers, self.load, strict=True):
            router.correct(pairs)

    def on_train_batch_end(self, *_: Any) -> None:
        """Count the pairs of a batch without an optimizer step of its own."""
        self._count()

    def _count(self) -> None:
        if self.fraction is not None:
            self.pairs.update(self.fraction, self.in_batch)
            self.fraction = None
