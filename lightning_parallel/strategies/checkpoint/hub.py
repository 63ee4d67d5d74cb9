"""Starts from the weights of a Hugging Face folder: `fit(ckpt_path=FOLDER)`, in which each rank reads its own part."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_parallel.checkpoint.damage import Damaged, shortened
from lightning_parallel.checkpoint.hub import wrapped
from lightning_parallel.checkpoint.hub.folder import HubState
from lightning_parallel.strategies.lightning_package import VERSION as LIGHTNING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

DEPTH = 3  # the most parts of a prefix in the module, as the two of `self.student.model = …`


def as_checkpoint(state: HubState) -> dict[str, Any]:
    """Weights alone, in the form of a checkpoint: a run that loads it begins at its first step."""
    return {
        "state_dict": state,
        "pytorch-lightning_version": LIGHTNING,
        "epoch": 0,
        "global_step": 0,
        "optimizer_states": [],
        "lr_schedulers": [],
    }


def named(module: nn.Module, state: HubState, strict: bool) -> dict[str, Tensor]:
    """The hub's weights under the names of a module.

    Args:
        module: holds the model anywhere, as in `self.model = AutoModelForCausalLM.from_config(config)`.
        state: what was read.
        strict: whether every parameter must be there, and nothing else.

    Raises:
        Damaged: nothing there is the module's; or, with `strict`, something is missing or left over.
    """
    own = module.state_dict(keep_vars=True)
    prefix, model = _wrapped(module)
    if model is not None:
        offered = wrapped.under_own_names(model, state)
    else:
        prefix, dropped = _prefixes(own, state)
        offered = {name.removeprefix(dropped): tensor for name, tensor in state.items()}
    made = {prefix + name: tensor for name, tensor in offered.items() if prefix + name in own}
    if not made:
        raise Damaged(
            f"{state.path} holds {shortened(sorted(state))}, and the model has {shortened(sorted(own))}: no name fits; "
            "build the model from the config.json of the same folder, or rename the weights in on_load_checkpoint"
        )
    missing = [
        name
        for name in _missing(module, made)
        if model is None or not wrapped.is_computed(model, name.removeprefix(prefix))
    ]
    _tell(state, missing, sorted(name for name in offered if prefix + name not in own), strict)
    return made


def _wrapped(module: nn.Module) -> tuple[str, PreTrainedModel | None]:
    """The first model of transformers in a module, and what its names begin with there."""
    if "transformers" not in sys.modules:
        return "", None
    from transformers import PreTrainedModel

    for path, part in module.named_modules():
        if isinstance(part, PreTrainedModel):
            return f"{path}." if path else "", part
    return "", None


def _prefixes(own: Collection[str], offered: Collection[str]) -> tuple[str, str]:
    """The prefix that names have in the module only, and that which they have in the hub only: where most names fit."""

    def fitting(prefix: str, dropped: str) -> int:
        there = {name.removeprefix(dropped) for name in offered}
        return sum(name.startswith(prefix) and name.removeprefix(prefix) in there for name in own)

    pairs = [(prefix, dropped) for prefix in _shared(own, DEPTH) for dropped in _shared(offered, 1)]
    return max(pairs, key=lambda pair: fitting(*pair))


def _shared(names: Iterable[str], depth: int) -> list[str]:
    """The prefixes that more than a quarter of the names have, and the empty one."""
    every = list(names)
    parts = Counter("".join(f"{part}." for part in name.split(".")[:n]) for name in every for n in range(1, depth + 1))
    return ["", *(prefix for prefix, times in parts.items() if 4 * times > len(every))]


def _missing(module: nn.Module, made: Mapping[str, Tensor]) -> list[str]:
    """Parameters that start from other values; of those that are tied, one is enough."""
    own = dict(module.named_parameters(remove_duplicate=False))
    there = {id(own[name]) for name in made if name in own}
    return sorted(name for name, parameter in own.items() if id(parameter) not in there)


def _tell(state: HubState, missing: Sequence[str], unused: Sequence[str], strict: bool) -> None:
    said = [f"the model has {shortened(missing)}, which are not there"] if missing else []
    said += [f"it has {shortened(unused)}, of which the model makes no use"] if unused else []
    if not said:
        log.info("Starting from the weights in %s", state.path)
    elif strict:
        raise Damaged(
            f"{state.path} and the model differ: {'; '.join(said)}. To train what is missing from its first values and "
            "leave out what is left over, as for a new head, set strict_loading=False on the LightningModule"
        )
    else:
        log.warning("Starting from the weights in %s: %s", state.path, "; ".join(said))
