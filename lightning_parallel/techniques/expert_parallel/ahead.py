"""Shared experts, computed while tokens travel.

The module around experts often has parts that all tokens go through, and calls them after the experts, by when all
tokens are back. In the first batch is seen which these are, and that they get what came in; from then on they are
computed while the results of experts are under way, and their call finds the result.

| a part's call | what it gives |
|---|---|
| was not computed ahead | its result; whether it could be next time is noted |
| was, on this very input | that result |
| was, on another input | its result; it is not computed ahead any more |

What a batch has shown holds from the next batch on: what is computed again in backward must be as it was in forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.expert_parallel.before import Draws
from lightning_parallel.techniques.tools.redirect import Forward, redirect_forward


class SharedExperts:
    """The parts beside the experts of one module.

    Args:
        owner: the module around experts.
        experts: they.
    """

    def __init__(self, owner: nn.Module, experts: nn.Module) -> None:
        beside = [part for part in owner.children() if part is not experts and any(True for _ in part.parameters())]
        self._ahead: set[nn.Module] = set()
        self._seen: dict[nn.Module, bool] = {}
        """Whether the parts that were called after the experts could have been computed before, so far."""
        self._entered: Tensor | None = None
        self._after_experts = False
        self._computed: dict[nn.Module, tuple[Tensor, int, Any]] = {}
        redirect_forward(owner, self._owner)
        for part in beside:
            redirect_forward(part, partial(self._part, part))

    def adopt(self) -> None:
        """A batch begins: what the one before has shown holds."""
        self._ahead = {part for part, could in self._seen.items() if could}

    def compute(self) -> None:
        """Results of experts are under way."""
        if self._entered is None:
            return
        self._after_experts = False
        for part in self._ahead:
            random = Draws.now()
            result = part.forward(self._entered)
            self._computed[part] = self._entered, self._entered._version, result
            if not random.same(Draws.now()):
                self._seen[part] = False  # it draws random numbers, which on one device others draw before it
        self._after_experts = True

    def _owner(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return forward(*args, **kwargs)
            inputs: Sequence[Any] = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            self._entered, self._after_experts = inputs[0] if inputs else None, False
            try:
                return forward(*args, **kwargs)
            finally:
                self._seen.update(dict.fromkeys(self._computed, False))  # nobody called them
                self._entered = None
                self._computed.clear()

        return run

    def _part(self, part: nn.Module, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or not self._after_experts:
                return forward(*args, **kwargs)
            alone = args[0] if len(args) == 1 and not kwargs else None
            if part in self._computed:
                entered, version, result = self._computed.pop(part)
                if alone is entered and entered._version == version:
                    return result
                self._seen[part] = False
            else:
                could = alone is not None and alone is self._entered
                self._seen[part] = self._seen.get(part, True) and could
            return forward(*args, **kwargs)

        return run
