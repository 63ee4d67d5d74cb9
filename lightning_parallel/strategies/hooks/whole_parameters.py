"""Parameters as one device has them, for hooks that look at the model: averages of weights, norms, samples of text.

Around such a hook every rank has all parameters and calls the model as one device does; what the hook writes stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.strategies.hooks.foreign_hooks import Places
from lightning_parallel.strategies.hooks.shown_gradient import ShownGradient, taken_over
from lightning_parallel.strategies.model.divided_model import DividedModel
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.trainer.optimizers import StoredOptimizers
from lightning_parallel.techniques.gradients.groups import Pair
from lightning_parallel.techniques.tools import elsewhere
from lightning_parallel.techniques.tools.redirect import plain_calls, plain_forwards
from lightning_parallel.techniques.tools.shards import bear, shard_of, whole_tensor

Wholes = dict[int, tuple[DTensor, nn.Parameter]]
"""By the `id` of a parameter of which ranks have parts: it, and the whole that stands for it."""


class WholeParameters:
    """Shows the whole model, for the time of a run, to the hooks that look at it.

    Args:
        divided: the module.
        host: all ranks, for messages of the host.
        optimizers: in whose groups they are, too.
    """

    def __init__(self, divided: DividedModel, host: dist.ProcessGroup, optimizers: StoredOptimizers) -> None:
        self._divided, self._host, self._optimizers = divided, host, optimizers
        self._inside = False

    @contextmanager
    def shown(self, reader: str, before: Wholes | None = None) -> Iterator[None]:
        """Inside, this rank has the whole model; all ranks must come.

        Args:
            reader: for whom, in messages.
            before: the whole parameters that it was shown already, to be shown again; new ones are added.
        """
        if self._inside or not self._divided.in_parts:
            yield
            return
        self._inside, module = True, self._divided.module
        try:
            self._require_room(reader)
            arrived = self._arrived()
            with ExitStack() as around:
                around.enter_context(self._divided.shown())
                around.enter_context(_filled(module, arrived))
                pairs = around.enter_context(_undivided(module, {} if before is None else before))
                around.enter_context(self._divided.represented(pairs))
                around.enter_context(self._divided.beside.shown())
                around.callback(self._divided.beside.look)  # what the hook has taken follows
                around.enter_context(self._optimizers.in_hook(pairs, _Copies(pairs, partial(self._follow, arrived))))
                around.enter_context(plain_forwards(module))
                around.enter_context(plain_calls(module))
                places = Places(module, [made for _, made in pairs])
                yield
                places.refuse_changes(reader)
        finally:
            self._inside = False

    def _arrived(self) -> dict[str, Tensor]:
        """The tensors that other stages hold, as they arrived here."""
        pipeline = self._divided.pipeline
        if pipeline.ranks == 1:
            return {}
        with elsewhere.unshown(self._divided.module):
            held = _tensors(self._divided.module)
            whole = {name: (whole_tensor(tensor.detach()), None) for name, tensor in held.items()}
            return {name: tensor for name, (tensor, _) in pipeline.shared(whole).items() if name not in held}

    def _follow(self, arrived: dict[str, Tensor]) -> None:
        """Tensors that other stages hold become as these are now."""
        for name, value in self._arrived().items():
            arrived[name].copy_(value)

    def _require_room(self, reader: str) -> None:
        """Raises on all ranks if one of them has no room for what it does not hold."""
        device = self._divided.mesh.device
        if device.type != "cuda":
            return
        with self._divided.shown():
            needed = sum(p.numel() * p.element_size() for p in self._divided.module.parameters())
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if not all(gather_objects(free > needed, self._host)):
            raise RuntimeError(
                f"{reader} looks at parameters, of which each rank has a part only; the whole model of "
                f"{needed / 2**30:.1f} GiB does not fit on every device; look at them in a checkpoint, or in a hook "
                "that runs less often, with more memory left"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = dict(module.named_parameters(remove_duplicate=False))
    return {**named, **dict(module.named_buffers(remove_duplicate=False))}


@contextmanager
def _filled(module: nn.Module, arrived: dict[str, Tensor]) -> Iterator[None]:
    """Inside, tensors without memory have these values, and buffers that a step made on another stage are there."""
    tensors = _tensors(module)
    before = {name: tensors[name].data for name in arrived if name in tensors}
    made = {name: _table_of(module, name) for name in arrived if name not in tensors}
    for name, value in arrived.items():
        if name in tensors:
            tensors[name].data = value
        else:
            made[name][name.rpartition(".")[2]] = value
    try:
        yield
    finally:
        for name, data in before.items():
            tensors[name].data = data
        for name, table in made.items():
            table[name.rpartition(".")[2]] = None


def _table_of(module: nn.Module, name: str) -> dict[str, Tensor | None]:
    return module.get_submodule(name.rpartition(".")[0])._buffers


@contextmanager
def _undivided(module: nn.Module, whole: Wholes) -> Iterator[list[Pair]]:
    """Inside, whole parameters stand for those of which ranks hold parts, as it yields; what is written stays."""
    places = [(part, name, tensor) for part in module.modules() for name, tensor in part._parameters.items()]
    divided: list[Any] = [place for place in places if isinstance(place[2], DTensor)]
    for tensor in {id(tensor): tensor for _, _, tensor in divided}.values():
        whole[id(tensor)] = tensor, _whole(tensor, whole.get(id(tensor), (None, None))[1])
    for part, name, tensor in divided:
        part._parameters[name] = whole[id(tensor)][1]
    try:
        yield [*whole.values()]
    finally:
        for part, name, tensor in divided:
            part._parameters[name] = tensor
        for tensor, made in whole.values():
            _take_over(tensor, made)


class _Copies:
    """Whole parameters in the place of divided ones, and those of other stages; see `Copies`."""

    def __init__(self, pairs: Sequence[Pair], others_follow: Callable[[], None]) -> None:
        self._pairs: Sequence[Any] = pairs
        self._others_follow = others_follow

    def settle(self) -> None:
        for tensor, made in self._pairs:
            _take_over(tensor, made)

    @torch.no_grad()
    def follow(self) -> None:
        for tensor, made in self._pairs:
            with torch._C.DisableTorchFunctionSubclass():
                made.copy_(whole_tensor(tensor.detach()))
            made.grad = None if tensor.grad is None else made.grad
        self._others_follow()


def _whole(tensor: Any, before: nn.Parameter | None) -> nn.Parameter:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # this is no read of the step's own
        value = whole_tensor(tensor.detach())
        made = nn.Parameter(value.clone(), tensor.requires_grad) if before is None else before
        bear(made, tensor)
        if made is before:
            made.copy_(value)
            made.grad = None
        if isinstance(tensor.grad, ShownGradient):
            made.grad = tensor.grad  # one for both: the optimizer has the divided parameter
        elif isinstance(tensor.grad, DTensor):
            made.grad = ShownGradient.of(tensor.grad)
    return made


@torch.no_grad()
def _take_over(tensor: Any, made: nn.Parameter) -> None:
    own = tensor._local_tensor
    if not made._version:  # it was read only, or written by `.data`: a backward that is to come may use the old one
        own = own.data
    own.copy_(shard_of(made.detach(), tensor).to_local())
    tensor.requires_grad_(made.requires_grad)
    tensor.grad = taken_over(made.grad, tensor.grad, tensor)
