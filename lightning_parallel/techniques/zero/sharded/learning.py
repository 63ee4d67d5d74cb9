"""Whether parameters learn, under ZeRO stage 3: a whole and its shard are frozen together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.techniques.tools.leaves import taken_out


class Learning:
    """Keeps the whole parameters of a running step frozen exactly when the sharded ones are, and the other way round.

    `fully_shard` looks at that when it gathers. Within a step, `toggle_optimizer` freezes what the optimizer holds, the
    shards; a user who writes `self.critic.requires_grad_(False)` there freezes the whole ones.

    Args:
        modules: under which parameters are looked at together, by their `id`.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        # by identity: the hash of a metric changes with its state, and that of a tensor takes a call of Python's
        self._slots = {key: _sharded_slots(module) for key, module in modules.items()}
        self._agreed: dict[int, bool] = {}

    def agree(self, module: nn.Module) -> None:
        """The whole and the sharded parameters under a module become as the one of the two that changed."""
        slots = self._slots[id(module)]
        with torch._C.DisableTorchFunctionSubclass():  # it would take its time where shards are `Away`
            learning = [shard.requires_grad for *_, shard in slots]
        for (owner, name, shard), learns in zip(slots, learning, strict=True):
            if name not in owner._parameters:
                raise taken_out(name)
            whole = owner._parameters[name]
            # what `functional_call` puts there says nothing of the parameter
            if whole is not None and whole.requires_grad != learns and isinstance(whole, nn.Parameter):
                if learns == self._agreed.get(id(shard), learns):
                    learns = whole.requires_grad
                whole.requires_grad_(learns)
                shard.requires_grad_(learns)
            self._agreed[id(shard)] = learns


def _sharded_slots(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if isinstance(parameter, DTensor)
    ]
