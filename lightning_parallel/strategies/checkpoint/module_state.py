"""Loading of full state dicts, and of weights of the Hugging Face hub, into a module whose parameters may be sharded.

Names and shapes are those of the full model on one device, whatever layout wrote them: each rank takes its own shard of
every tensor.
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
from lightning_parallel.checkpoint.lazy_tensor import in_memory
from lightning_parallel.techniques.tools.shards import local, shard_of
from lightning_parallel.techniques.tools.stage_tree import tree_of

log = logging.getLogger(__name__)


def saved_metrics(module: nn.Module) -> list[Metric]:
    """Return the metrics in a module that have persistent states."""
    metrics = (submodule for submodule in module.modules() if isinstance(submodule, Metric))
    return [metric for metric in metrics if any(metric._persistent.values())]


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load full tensors into a module whose parameters may be sharded, without communication.

    Meanwhile each sharded parameter is replaced by a plain one over its local shard: DTensor cannot copy into an
    `ElementsShard`, and so only the local shard is read from disk.
    """
    tree, local_state, plain = tree_of(module), dict[str, Any](), dict[int, nn.Parameter]()
    parameters: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad(), ExitStack() as after:
        for name, value in state.items():
            parameter = parameters.get(name)
            if tree is not None and name in tree.remote:
                continue
            local_state[name] = in_memory(value) if parameter is None else value  # a metric keeps what it loads
            # `load_state_dict` reports a value of another shape
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and parameter.shape == value.shape:
                local_state[name] = local(value if isinstance(value, DTensor) else shard_of(value, parameter))
                local_state[name] = local_state[name].to(parameter.dtype)
                plain[id(parameter)] = nn.Parameter(local(parameter), parameter.requires_grad)
        for submodule in module.modules():
            if held := {name: plain[id(each)] for name, each in submodule._parameters.items() if id(each) in plain}:
                after.callback(submodule._parameters.update, {name: submodule._parameters[name] for name in held})
                submodule._parameters.update(held)
        module.load_state_dict(local_state, strict=strict)


def hub_weights(module: nn.Module, state: HubState, strict: bool) -> dict[str, Tensor]:
    """Return the hub's weights under the names of a module.

    Args:
        module: contains a model of transformers, as in `self.model = AutoModelForCausalLM.from_config(config)`, or has
            the names that the folder has.
        state: the weights as read.
        strict: whether to raise if names are missing or unused.

    Raises:
        Damaged: no name is the module's; or, with `strict`, a parameter is missing or a weight is not used.
    """
    known = module.state_dict(keep_vars=True)
    prefix, model = "", None  # the first model of transformers in the module, and the prefix of its names there
    if "transformers" in sys.modules:
        from transformers import PreTrainedModel

        for path, submodule in module.named_modules():
            if isinstance(submodule, PreTrainedModel):
                prefix, model = f"{path}." if path else "", submodule
                break
    offered: Mapping[str, Tensor] = state if model is None else hub.to_model_names(model, state)
    result = {prefix + name: tensor for name, tensor in offered.items() if prefix + name in known}
    if not result:
        raise Damaged(
            f"{state.path} holds {shortened(sorted(state))}, but the model has {shortened(sorted(known))}: no "
            "name fits; build the model from the folder's config.json, or rename the weights in on_load_checkpoint"
        )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    present = {id(parameters[name]) for name in result if name in parameters}  # one name of tied parameters is enough
    missing = sorted(name for name, parameter in parameters.items() if id(parameter) not in present)
    if model is not None:
        missing = [name for name in missing if not hub.is_computed(model, name.removeprefix(prefix))]
    unused = sorted(name for name in offered if prefix + name not in known)
    notes = [f"the folder lacks {shortened(missing)}"] if missing else []
    notes += [f"the model does not use {shortened(unused)}"] if unused else []
    if notes and strict:
        raise Damaged(
            f"{state.path} and the model differ: {'; '.join(notes)}. To keep the initial values of what is "
            "missing and ignore what is not used, as for a new head, set strict_loading=False on the LightningModule"
        )
    message = ": ".join([f"Starting from the weights in {state.path}", *(["; ".join(notes)] if notes else [])])
    log.log(logging.WARNING if notes else logging.INFO, "%s", message)
    return result
