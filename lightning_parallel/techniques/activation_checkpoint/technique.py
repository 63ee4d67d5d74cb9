"""Activation checkpointing: blocks keep their inputs and recompute the rest in backward.

Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016;
V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023 (selective).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_parallel.arguments import one_of
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.techniques.activation_checkpoint.effects import Effects
from lightning_parallel.techniques.activation_checkpoint.in_graph import breaking_where_written
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools.caches import holds_keys, is_cache, is_filled_by_layers, layers_in
from lightning_parallel.techniques.tools.redirect import Forward, default_dtype, redirect_forward

aten = torch.ops.aten
EXPENSIVE = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Operations whose results the selective mode keeps: their recomputation costs most of the forward."""


@dataclass(frozen=True)
class ActivationCheckpoint(Technique):
    """Recomputes activations of the plan's blocks in backward instead of keeping them.

    Args:
        mode: "full" keeps only a block's inputs (2sbh bytes a layer, about a third more FLOPs); "selective" keeps the
            results of matrix products and attention and recomputes the cheap rest.

    Raises:
        ValueError: an unknown mode, or (when training starts) a model without blocks.
    """

    mode: Literal["full", "selective"] = "full"

    phase: ClassVar[Phase] = Phase.CHECKPOINT

    def __post_init__(self) -> None:
        one_of("ActivationCheckpoint", "mode", self.mode, ("full", "selective"))

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(keeps_backward_whole="recomputes the forward in every backward")

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`: none."""
        return {}

    def divide(self, model: nn.Module, ground: PartitionContext, seen: None) -> Division:
        """Leads the forward of every block through a checkpoint."""
        for block in ground.plan.require_blocks(model, repr(self)).values():
            redirect_forward(block, functools.partial(self._recomputed, block))
        return Division(model)

    def _recomputed(self, block: nn.Module, forward: Forward) -> Forward:
        extra: dict[str, Any] = {} if self.mode == "full" else {"context_fn": _keep_expensive}
        tables = [part._parameters for part in block.modules() if part._parameters]
        layers, effects = layers_in(block), Effects(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            caches = [each for each in (*args, *kwargs.values()) if is_cache(each)]
            # without any, nothing looks at the layers' numbers: a graph would be of one layer alone
            prefixed = bool(caches) and any(holds_keys(each, layers) for each in caches)  # it would add to them twice
            if prefixed or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            args = tuple([None if is_filled_by_layers("", each) else each for each in args])
            return _recomputed(tables, forward, effects, extra, args, _without_caches(kwargs))

        return run


def _recomputed(
    tables: list[dict[str, Any]],
    forward: Forward,
    effects: Effects,
    extra: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What the forward returns, whose activations are recomputed.

    Args:
        tables: of the block's parameters.
        forward: of the block.
        effects: watches what it writes.
        extra: options of `checkpoint`.
        args: what the block is given.
        kwargs: the same by name.
    """
    if torch.compiler.is_dynamo_compiling():  # what is in a graph writes once, and computes with what is there
        return checkpoint(breaking_where_written(forward), *args, use_reentrant=False, **extra, **kwargs)
    kept = effects.kept((args, kwargs))
    runs = _Runs(_with_given(tables, forward), effects, args, kwargs)
    return checkpoint(runs, *kept[0], use_reentrant=False, **extra, **kept[1])


skip_code(_recomputed.__code__)  # where a graph breaks in it, it runs as it is: nothing is compiled then


class _Runs:
    """The first run of a forward and its recomputations.

    What a block writes is the first run's to write: a step may read it there. Recomputations find what was there before
    it, and the default dtype of the first run, which was set for the forward alone.

    Args:
        forward: of the block.
        effects: watches what it writes.
        args: what the first run gets.
        kwargs: the same by name.
    """

    def __init__(self, forward: Forward, effects: Effects, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forward, self._effects, self._found = forward, effects, effects.before((args, kwargs))
        self._first = [(args, kwargs)]
        self._dtype = torch.get_default_dtype()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward: with what the user gave the first time, then with copies of what is given here."""
        if self._first:
            args, kwargs = self._first.pop()
            result = self._forward(*args, **kwargs)
            self._effects.after(self._found)
            return result
        args, kwargs = self._effects.kept((args, kwargs))
        with default_dtype(self._dtype), self._effects.again(self._found):
            return self._forward(*args, **kwargs)


def _with_given(tables: list[dict[str, Any]], forward: Forward) -> Forward:
    """The forward with what stands now in the place of parameters, as `functional_call` or a step puts it there.

    What other techniques show there, they show again to a recomputation.
    """
    given = [(table, name, each) for table in tables for name, each in table.items()
             if type(each) is nn.Parameter or (each is not None and not isinstance(each, nn.Parameter))]  # fmt: skip

    def run(*args: Any, **kwargs: Any) -> Any:
        others = [(table, name, table[name], each) for table, name, each in given if table[name] is not each]
        for table, name, _, each in others:
            table[name] = each
        try:
            return forward(*args, **kwargs)
        finally:
            for table, name, now, _ in others:
                table[name] = now

    return run


def _keep_expensive() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    # Hugging Face models fill a key-value cache even in training; filled a second time it would double the keys.
    # What else has such a name, as learned prefixes have, is an input.
    dropped: dict[str, Any] = {name: None for name, each in kwargs.items() if is_filled_by_layers(name, each)}
    return {**kwargs, **dropped, **({"use_cache": False} if "use_cache" in kwargs else {})}
