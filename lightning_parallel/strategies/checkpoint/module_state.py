"""A module's state as one device would have it, from ranks that hold parts of it, and back.

Names and shapes are those of the whole. Tensors are gathered, one at a time, or are the parts themselves. Any layout
reads what any other wrote: each rank takes its own part of every tensor.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_parallel.checkpoint import hub
from lightning_parallel.checkpoint.files import Damaged, shortened
from lightning_parallel.checkpoint.hub import HubState
from lightning_parallel.checkpoint.stored import in_memory
from lightning_parallel.techniques.tools.elsewhere import tree_of
from lightning_parallel.techniques.tools.shards import local, shard_of

log = logging.getLogger(__name__)


def saved_metrics(module: nn.Module) -> list[Metric]:
    """The metrics in a module of whose states some are saved."""
    metrics = (part for part in module.modules() if isinstance(part, Metric))
    return [metric for metric in metrics if any(metric._persistent.values())]


def load_whole_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load whole tensors into a module whose parameters may be sharded, without communication.

    A sharded parameter is a plain one of this rank's part meanwhile: DTensor cannot copy lists of elements, and of what
    is on the disk only the part is read.
    """
    tree, parts, plain = tree_of(module), dict[str, Any](), dict[int, nn.Parameter]()
    own: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad(), ExitStack() as after:
        for name, value in state.items():
            parameter = own.get(name)
            if tree is not None and name in tree.remote:
                continue
            parts[name] = in_memory(value) if parameter is None else value  # a metric keeps what it loads
            # torch tells of a value that has another shape
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and parameter.shape == value.shape:
                parts[name] = local(value if isinstance(value, DTensor) else shard_of(value, parameter))
                parts[name] = parts[name].to(parameter.dtype)
                plain[id(parameter)] = nn.Parameter(local(parameter), parameter.requires_grad)
        for part in module.modules():
            if held := {name: plain[id(each)] for name, each in part._parameters.items() if id(each) in plain}:
                after.callback(part._parameters.update, {name: part._parameters[name] for name in held})
                part._parameters.update(held)
        module.load_state_dict(parts, strict=strict)


def hub_weights(module: nn.Module, state: HubState, strict: bool) -> dict[str, Tensor]:
    """The hub's weights under the names of a module.

    Args:
        module: holds a model of transformers anywhere, as in `self.model = AutoModelForCausalLM.from_config(config)`,
            or has the names that are in the folder.
        state: what was read.
        strict: whether every parameter must be there, and nothing else.

    Raises:
        Damaged: nothing there is the module's; or, with `strict`, something is missing or left over.
    """
    own = module.state_dict(keep_vars=True)
    prefix, model = "", None  # the first model of transformers in the module, and what its names begin with there
    if "transformers" in sys.modules:
        from transformers import PreTrainedModel

        for path, part in module.named_modules():
            if isinstance(part, PreTrainedModel):
                prefix, model = f"{path}." if path else "", part
                break
    offered: Mapping[str, Tensor] = state if model is None else hub.under_own_names(model, state)
    made = {prefix + name: tensor for name, tensor in offered.items() if prefix + name in own}
    if not made:
        raise Damaged(
            f"{state.path} holds {shortened(sorted(state))}, and the model has {shortened(sorted(own))}: no name fits; "
            "build the model from the config.json of the same folder, or rename the weights in on_load_checkpoint"
        )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    there = {id(parameters[name]) for name in made if name in parameters}  # of those that are tied, one is enough
    missing = sorted(name for name, parameter in parameters.items() if id(parameter) not in there)
    if model is not None:
        missing = [name for name in missing if not hub.is_computed(model, name.removeprefix(prefix))]
    unused = sorted(name for name in offered if prefix + name not in own)
    said = [f"the model has {shortened(missing)}, which are not there"] if missing else []
    said += [f"it has {shortened(unused)}, of which the model makes no use"] if unused else []
    if said and strict:
        raise Damaged(
            f"{state.path} and the model differ: {'; '.join(said)}. To train what is missing from its first values and "
            "leave out what is left over, as for a new head, set strict_loading=False on the LightningModule"
        )
    told = ": ".join([f"Starting from the weights in {state.path}", *(["; ".join(said)] if said else [])])
    log.log(logging.WARNING if said else logging.INFO, "%s", told)
    return made
