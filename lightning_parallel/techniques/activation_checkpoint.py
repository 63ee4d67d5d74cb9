"""Activation checkpointing: blocks keep their inputs and recompute activations in backward.

`torch.utils.checkpoint.checkpoint` recomputes. Side effects of a block's forward are handled as follows:

| a block writes to | effect |
|---|---|
| its buffers (running statistics, token counts) | once; recomputation runs on copies of the values before the forward |
| lists, dicts and sets among its arguments | once; recomputation gets copies |
| parameters, or tensors among its arguments | ValueError: recomputation would start from the values written |
| attributes of its modules | repeated in recomputation, as in `torch.utils.checkpoint` |

Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016;
V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023 (selective).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._dynamo.comptime import ComptimeContext, comptime
from torch._dynamo.eval_frame import skip_code
from torch._higher_order_ops.flex_attention import flex_attention
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_parallel.arguments import one_of
from lightning_parallel.techniques.divided.step_parameters import computing
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools.redirect import Forward, default_dtype, redirect_forward
from lightning_parallel.techniques.tools.shards import local
from lightning_parallel.values import tensors_of

F = TypeVar("F", bound=Callable[..., Any])

aten = torch.ops.aten
SAVED_OPERATIONS = {
    flex_attention,
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default),
    *(aten.convolution.default, aten._grouped_mm.default, aten._scaled_mm.default, aten._scaled_grouped_mm.default),
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
}
"""Operations whose results the selective mode saves: they are most of the cost of a forward."""

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Names of the argument by which most Hugging Face layers get the key-value cache, which they fill in training too."""
NOT_CACHES = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, slice, range)
"""Types that are no caches, tested first: Dynamo of torch 2.11 breaks the graph where it reads their `__name__`."""


@dataclass(frozen=True)
class ActivationCheckpoint(Technique):
    """Recomputes activations of the plan's blocks in backward instead of keeping them.

    Args:
        mode: "full" keeps only a block's inputs (2sbh bytes a layer, about a third more FLOPs); "selective" also keeps
            the results of matrix products and attention and recomputes the cheap rest.

    Raises:
        ValueError: an unknown mode, or (when training starts) a model without blocks, or (in a step) a block that
            writes its parameters or inputs.
    """

    mode: Literal["full", "selective"] = "full"

    phase: ClassVar[Phase] = Phase.CHECKPOINT

    def __post_init__(self) -> None:
        one_of("ActivationCheckpoint", "mode", self.mode, ("full", "selective"))

    @property
    def traits(self) -> Traits:
        """See `Technique.traits`."""
        return Traits(why_backward_is_joint="recomputes the forward in every backward")

    def divide(self, model: nn.Module, context: PartitionContext, analysis: None) -> Division:
        """Wrap the forward of every block in a checkpoint."""
        for block in context.plan.require_blocks(model, repr(self)).values():
            redirect_forward(block, self._recomputed, block)
        return Division(model)

    def _recomputed(self, block: nn.Module, forward: Forward) -> Forward:
        options: dict[str, Any] = {"use_reentrant": False}
        if self.mode == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        numbers = [getattr(part, "layer_idx", None) for part in block.modules()]
        layers = [number for number in numbers if isinstance(number, int)]  # indices of this block's layers in a cache
        written = WriteDetector(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            caches = [each for each in (*args, *kwargs.values()) if is_cache("", each)]
            # A cache with keys of layers that have not run yet holds inputs, such as learned prefixes; recomputation
            # would append to it twice. Without a cache `layers` is not read, which would tie a graph to one layer.
            prefixed = bool(caches) and any(cache.get_seq_length(layer) for cache in caches for layer in layers)
            if prefixed or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            # Hugging Face models fill a key-value cache even in training; recomputation would fill it again and double
            # the keys, so blocks get None. Other values under such a name, such as learned prefixes, are inputs.
            args = tuple([None if is_cache("", each) else each for each in args])
            kwargs = {name: None if is_cache(name, each) else each for name, each in kwargs.items()}
            if "use_cache" in kwargs:
                kwargs["use_cache"] = False
            return _checkpointed(forward, written, options, args, kwargs)

        return run


def is_cache(name: str, value: Any) -> bool:
    """Whether an argument is a cache to which layers append: by its name, or of Hugging Face under any name."""
    if type(value) in NOT_CACHES or not type(value).__name__.endswith("Cache"):
        return False
    return name in CACHES or getattr(value, "get_seq_length", None) is not None


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(
    forward: Forward, written: WriteDetector, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return checkpoint(_break_graph_if_written(forward), *args, **options, **kwargs)
    snapshot, dtype = written.before((args, kwargs)), torch.get_default_dtype()
    first = [(args, kwargs)]

    def run(*again_args: Any, **again_kwargs: Any) -> Any:
        if first:  # the original arguments, so that what the block writes into lists reaches the caller
            args, kwargs = first.pop()
            result = forward(*args, **kwargs)
            written.after(snapshot)
            return result
        with default_dtype(dtype), snapshot.in_place():  # precision plugins set the dtype during the forward only
            return forward(*copied(again_args), **copied(again_kwargs))

    return checkpoint(run, *copied(args), **options, **copied(kwargs))


skip_code(_checkpointed.__code__)  # after a graph break inside, it runs without being compiled


def _break_graph_if_written(forward: Forward) -> Forward:
    """Wrap a forward for Dynamo: break the graph, so that it runs uncompiled, if it writes to a tensor argument.

    The backward of a graph recomputes from the values at that time, overwritten or not; outside of graphs recomputation
    starts from the values that the forward had.
    """

    def leave_out(context: ComptimeContext) -> None:
        storages = [
            (node.op == "placeholder", tensor._version, tensor.untyped_storage()._cdata)
            for node in context.graph().nodes
            for tensor in tensors_of(node.meta.get("example_value"))
            if tensor.layout == torch.strided
        ]
        written = {storage for _, version, storage in storages if version}  # through a tensor or a view of it
        if any(is_input and storage in written for is_input, _, storage in storages):
            context.graph_break("a recomputed forward writes to a tensor from outside it")

    def run(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        comptime(leave_out)
        return result

    return run


def copied(value: Any) -> Any:
    """Copy lists, tuples, dicts and sets, nested ones too; return any other value as it is."""
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(member) for key, member in value.items()}
    return set(value) if type(value) is set else value


# After a graph break nearby Dynamo would trace this bookkeeping, whose tensors are on several devices.
not_compiled = cast(Callable[[F], F], torch.compiler.disable)


@dataclass
class BlockSnapshot:
    """State of a block before a forward, for its recomputation."""

    # buffers that the block may write: (`module._buffers`, name, copy)
    buffers: list[tuple[dict[str, Any], str, Tensor]]
    # (`module._parameters`, name, tensor), e.g. as `functional_call` sets them; not those that techniques replace
    parameters: list[tuple[dict[str, Any], str, Tensor]]
    # (module of a buffer, FQN of a parameter, or words for the arguments; tensor; its `_version`)
    versions: list[tuple[nn.Module | str, Tensor, int]]
    # before the first forward only: (FQN, parameter, copy), as a write to `weight.data` does not change `_version`
    values: list[tuple[str, Tensor, Tensor]]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the block has the tensors of this snapshot; afterwards its present ones again."""
        with _disable_current_modes():  # selective recomputation expects the operations of the forward and no others
            slots = [(table, name, table[name], copy.clone()) for table, name, copy in self.buffers]
        slots += [(table, name, table[name], old) for table, name, old in self.parameters if table[name] is not old]
        for table, name, _, old in slots:
            table[name] = old
        try:
            yield
        finally:
            for table, name, present, _ in slots:
                table[name] = present


class WriteDetector:
    """Detects what the forward of a checkpointed block writes, by versions of tensors before and after it."""

    def __init__(self, block: nn.Module) -> None:
        self._kind = type(block).__name__
        self._parts = [(path, part) for path, part in block.named_modules() if part._parameters or part._buffers]
        self._writers: set[nn.Module] | None = None
        """Modules that have written buffers so far; None before the first forward, for which all buffers are copied."""

    @not_compiled
    def before(self, inputs: Any) -> BlockSnapshot:
        """Return a snapshot of the block before a forward with these inputs."""
        snapshot = BlockSnapshot([], [], [], [])
        for path, module in self._parts:
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                tensor, fqn = _memory(parameter), f"{path}.{name}".lstrip(".")
                snapshot.versions.append((fqn, tensor, tensor._version))
                if self._writers is None and not tensor.is_meta:
                    snapshot.values.append((fqn, tensor.detach(), tensor.detach().clone()))
                if type(parameter) is nn.Parameter or not isinstance(parameter, nn.Parameter):
                    snapshot.parameters.append((module._parameters, name, parameter))
            snapshot.versions += [(module, buf, buf._version) for buf in module._buffers.values() if buf is not None]
            if self._writers is None or module in self._writers:
                snapshot.buffers += _copies(module)
        snapshot.versions += [("its inputs", each, each._version) for each in map(_memory, tensors_of(inputs))]
        return snapshot

    @not_compiled
    def after(self, found: BlockSnapshot) -> None:
        """Compare with the snapshot `found`, and note which modules write buffers. Called after the forward.

        Raises:
            ValueError: the forward wrote parameters or inputs.
        """
        changed = [what for what, tensor, version in found.versions if tensor._version != version]
        names = [what for what in changed if isinstance(what, str)]
        for fqn, tensor, copy in found.values:
            if tensor.shape == copy.shape and not torch.equal(tensor.nan_to_num(), copy.nan_to_num()):
                names.append(fqn)
        if names:
            raise ValueError(
                f"{self._kind} writes to {', '.join(dict.fromkeys(names))} in its forward, so ActivationCheckpoint "
                "would recompute from changed values. Make a new tensor (x = x + y, not x += y); write parameters in "
                "the step or a hook, as on_train_batch_end; or train without ActivationCheckpoint"
            )
        # Kernels of norms write running statistics without changing `_version`, but `num_batches_tracked` in the same
        # module changes its own. A buffer may also have been replaced by another tensor.
        before = {id(tensor) for _, tensor, _ in found.versions}
        writers = {what for what in changed if isinstance(what, nn.Module)}
        for _, module in self._parts:
            if any(buffer is not None and id(buffer) not in before for buffer in module._buffers.values()):
                writers.add(module)
        if self._writers is not None:  # first write of these modules: recomputation starts from the values written
            found.buffers += [copy for module in writers - self._writers for copy in _copies(module)]
        self._writers = writers | (self._writers or set())
        found.versions, found.values = [], []


def _copies(part: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    buffers = part._buffers
    return [(buffers, name, buffer.detach().clone()) for name, buffer in buffers.items() if buffer is not None]


def _memory(tensor: Any) -> Tensor:
    """Return the plain local tensor of a tensor that may be sharded."""
    computes = computing(tensor)
    result: Tensor = computes.own if isinstance(computes, Divided) else local(tensor)
    return result
