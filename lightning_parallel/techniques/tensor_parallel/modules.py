"""The forwards of divided modules: plain local tensors in, plain local tensors out.

Y = X A with A divided by columns needs the whole X and gives some columns of Y; Z = Y B with B divided by rows needs
these columns of Y and gives a summand of Z. So a pair of them costs one sum.
Source: M. Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.collectives.conjugate import sum_over_ranks
from lightning_parallel.techniques.tensor_parallel.activations import Activations
from lightning_parallel.techniques.tensor_parallel.layout import Divided, is_transposed
from lightning_parallel.techniques.tensor_parallel.whole.logits import DividedLogits
from lightning_parallel.techniques.tensor_parallel.whole.loss import Columns, check_numbers
from lightning_parallel.techniques.tools.leaves import leaf_of
from lightning_parallel.techniques.tools.redirect import Forward

Compute = Callable[[Tensor, bool], Tensor]
Maker = Callable[[Divided, Activations, Forward], Forward]


def divided_forward(divided: Divided, activations: Activations, forward: Forward, region: str = "") -> Forward:
    """The forward of a divided module, by its style.

    Args:
        divided: the module and its style.
        activations: how its regions are entered and left.
        forward: as its class has it.
        region: the name of the module that holds it in its block.
    """
    makers: dict[str, Maker] = {
        "colwise": partial(_in_region, region, _colwise, _colwise_gather_output),
        "rowwise": partial(_in_region, region, _rowwise, _rowwise_split_input),
        "colwise_gather_output": _colwise_gather_output,
        "rowwise_split_input": _rowwise_split_input,
        "vocabulary": _embedding if isinstance(divided.module, nn.Embedding) else _head,
    }
    return makers[divided.style.kind](divided, activations, forward)


def _in_region(
    region: str, apart: Maker, whole: Maker, divided: Divided, activations: Activations, forward: Forward
) -> Forward:
    """In most regions ranks compute with their own features; in those that the block's mode gathers, with all."""
    run_apart, run_whole = apart(divided, activations, forward), whole(divided, activations, forward)

    def run(x: Tensor) -> Tensor:
        y: Tensor = (run_whole if region in activations.mode.gathered else run_apart)(x)
        return y

    return run


def _colwise(divided: Divided, activations: Activations, forward: Forward) -> Forward:
    compute, parameters = _linear(divided.module, forward), divided.module._parameters
    plain = _is_plain(divided.module)

    def run(x: Tensor) -> Tensor:
        if plain and activations.may_overlap(x, enters=True):
            y, bias = activations.enter_and_multiply(x, _weight(parameters)), _bias(parameters, True)
            return y if bias is None else y + bias.to(y.dtype)
        entered = activations.enter(x)
        if activations.attended:
            return activations.attend(lambda: compute(entered, True))
        return compute(entered, True)

    return run


def _rowwise(divided: Divided, activations: Activations, forward: Forward) -> Forward:
    compute, parameters = _linear(divided.module, forward), divided.module._parameters
    plain = _is_plain(divided.module)

    def run(x: Tensor) -> Tensor:
        if plain and activations.may_overlap(x, enters=False):
            y = activations.multiply_and_leave(x, _weight(parameters))
        else:
            y = activations.leave(compute(x, False))
        bias = parameters.get("bias")
        return y if bias is None else y + bias.to(y.dtype)

    return run


def _colwise_gather_output(divided: Divided, activations: Activations, forward: Forward) -> Forward:
    compute, features, parts = _colwise(divided, activations, forward), divided.features, divided.parts

    def run(x: Tensor) -> Tensor:
        return activations.join_features(compute(x), features, parts)

    return run


def _rowwise_split_input(divided: Divided, activations: Activations, forward: Forward) -> Forward:
    compute = _rowwise(divided, activations, forward)

    def run(x: Tensor) -> Tensor:
        y: Tensor = compute(activations.own_features(x))
        return y

    return run


def _head(divided: Divided, activations: Activations, forward: Forward) -> Forward:
    compute, size = _colwise(divided, activations, forward), divided.features

    def run(x: Tensor) -> Tensor:
        own = compute(x)
        activations.forget()
        return DividedLogits.of(own, size, activations.group)

    return run


def _embedding(divided: Divided, activations: Activations, forward: Forward) -> Forward:
    module, columns = divided.module, Columns(divided.features, activations.group)
    assert isinstance(module, nn.Embedding)
    lookup, start, stop = _lookup(module, forward, columns), columns.start, columns.stop

    def run(ids: Tensor) -> Tensor:
        check_numbers(ids, columns.size, "The id", "rows in the embedding")
        own = (ids >= start) & (ids < stop)
        rows = lookup((ids - start).masked_fill(~own, 0))
        return sum_over_ranks(rows.masked_fill(~own[..., None], 0), activations.group)

    return run


def _lookup(module: nn.Embedding, forward: Forward, columns: Columns) -> Callable[[Tensor], Tensor]:
    padding, start, stop = module.padding_idx, columns.start, columns.stop
    own_padding = padding - start if padding is not None and start <= padding < stop else None

    def lookup(ids: Tensor) -> Tensor:
        if start == stop:
            weight = module.weight
            return torch.zeros(*ids.shape, module.embedding_dim, dtype=weight.dtype, device=ids.device)
        with _own_parameters(module):
            module.padding_idx = own_padding
            try:
                result: Tensor = forward(ids)
            finally:
                module.padding_idx = padding
        return result

    return lookup


def _linear(module: nn.Module, forward: Forward) -> Compute:
    """Computes with this rank's part of the weight, and of the bias where asked for."""
    parameters = module._parameters
    if is_transposed(module):
        return lambda x, biased: _conv1d(x, parameters, biased)
    if _is_plain(module):
        return partial(_plain_linear, parameters)
    return lambda x, biased: _as_written(module, forward, x, biased)


def _is_plain(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _plain_linear(parameters: Any, x: Tensor, biased: bool) -> Tensor:
    bias = parameters["bias"] if biased else None
    return F.linear(x, leaf_of(parameters["weight"]), None if bias is None else leaf_of(bias))


def _conv1d(x: Tensor, parameters: Any, biased: bool) -> Tensor:
    weight, bias = leaf_of(parameters["weight"]), _bias(parameters, biased)
    rows = x.reshape(-1, x.shape[-1])
    y = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def _weight(parameters: Any) -> Tensor:
    return leaf_of(parameters["weight"])


def _bias(parameters: Any, biased: bool) -> Tensor | None:
    bias = parameters.get("bias") if biased else None
    return None if bias is None else leaf_of(bias)


def _as_written(module: nn.Module, forward: Forward, x: Tensor, biased: bool) -> Tensor:
    with _own_parameters(module, biased):
        result: Tensor = forward(x)
    return result


@contextmanager
def _own_parameters(module: nn.Module, biased: bool = True) -> Iterator[None]:
    """Inside, the module holds plain parts of its parameters, for a forward that its class has written itself."""
    kept: dict[str, Any] = dict(module._parameters)
    plain = {name: None if parameter is None else leaf_of(parameter) for name, parameter in kept.items()}
    if not biased:
        plain["bias"] = None
    module._parameters.update(plain)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(kept)
