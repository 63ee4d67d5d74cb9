"""Activation checkpointing: blocks keep their inputs and recompute the rest in backward.

Torch's own `checkpoint` recomputes. What a block writes while it computes is handled like this:

| a block writes | then |
|---|---|
| its buffers (running statistics, counts of tokens) | once; the recomputation computes with copies of what was there |
| lists, dicts and sets that it is given | once; the recomputation gets copies |
| parameters, or tensors that it is given | ValueError: the recomputation would start from what was written |
| attributes of its modules | again in the recomputation, as `torch.utils.checkpoint` does |

Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016;
V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023 (selective).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
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
from lightning_parallel.mesh import Axis, Size
from lightning_parallel.techniques.divided.parts import computing
from lightning_parallel.techniques.divided.tensor import Divided
from lightning_parallel.techniques.division import Division, PartitionContext
from lightning_parallel.techniques.technique import Phase, Technique, Traits
from lightning_parallel.techniques.tools.redirect import Forward, default_dtype, redirect_forward
from lightning_parallel.techniques.tools.shards import local
from lightning_parallel.values import tensors_of

F = TypeVar("F", bound=Callable[..., Any])

aten = torch.ops.aten
EXPENSIVE = {
    flex_attention,
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default),
    *(aten.convolution.default, aten._grouped_mm.default, aten._scaled_mm.default, aten._scaled_grouped_mm.default),
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
}
"""Operations whose results the selective mode keeps: their recomputation costs most of the forward."""

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""The names under which most layers of Hugging Face's get their caches, which these models fill also in training."""
BUILT_IN = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, slice, range)
"""Types that are no caches; they are asked for first, as dynamo of torch 2.11 breaks a graph at their names."""


@dataclass(frozen=True)
class ActivationCheckpoint(Technique):
    """Recomputes activations of the plan's blocks in backward instead of keeping them.

    Args:
        mode: "full" keeps only a block's inputs (2sbh bytes a layer, about a third more FLOPs); "selective" keeps the
            results of matrix products and attention and recomputes the cheap rest.

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
        return Traits(keeps_backward_whole="recomputes the forward in every backward")

    @property
    def axes(self) -> Mapping[Axis, Size]:
        """See `Technique.axes`: none."""
        return {}

    def divide(self, model: nn.Module, ground: PartitionContext, seen: None) -> Division:
        """Leads the forward of every block through a checkpoint."""
        for block in ground.plan.require_blocks(model, repr(self)).values():
            redirect_forward(block, self._recomputed, block)
        return Division(model)

    def _recomputed(self, block: nn.Module, forward: Forward) -> Forward:
        options: dict[str, Any] = {"use_reentrant": False}
        if self.mode == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        numbers = [getattr(part, "layer_idx", None) for part in block.modules()]
        layers = [number for number in numbers if isinstance(number, int)]  # by which layers find their keys in a cache
        written = Written(block)

        def run(*args: Any, **kwargs: Any) -> Any:
            caches = [each for each in (*args, *kwargs.values()) if is_cache(each)]
            # Without any, nothing reads the layers' numbers: a graph would be of one layer alone.
            lengths = [getattr(each, "get_seq_length", None) for each in caches]
            # It would add twice to keys of layers that are yet to run: these are inputs, as learned prefixes are.
            prefixed = bool(caches) and any(of is not None and any(of(layer) for layer in layers) for of in lengths)
            if prefixed or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            # Hugging Face models fill a key-value cache even in training; filled a second time it would double the
            # keys. What else has such a name, as learned prefixes have, is an input.
            args = tuple([None if is_filled_by_layers("", each) else each for each in args])
            kwargs = {name: None if is_filled_by_layers(name, each) else each for name, each in kwargs.items()}
            if "use_cache" in kwargs:
                kwargs["use_cache"] = False
            return _checkpointed(forward, written, options, args, kwargs)

        return run


def is_cache(value: Any) -> bool:
    """Whether a value holds keys and values of earlier positions; who runs a layer twice must not add to it twice."""
    return type(value) not in BUILT_IN and type(value).__name__.endswith("Cache")


def is_filled_by_layers(name: str, value: Any) -> bool:
    """Whether an argument is a cache to which layers add: by its name, or as Hugging Face's under any name."""
    return is_cache(value) and (name in CACHES or getattr(value, "get_seq_length", None) is not None)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(
    forward: Forward, written: Written, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if torch.compiler.is_dynamo_compiling():
        return checkpoint(_left_out_where_written(forward), *args, **options, **kwargs)
    found, dtype = written.before((args, kwargs)), torch.get_default_dtype()
    first = [(args, kwargs)]

    def run(*again_args: Any, **again_kwargs: Any) -> Any:
        if first:  # with what the user gave: what the block writes into lists is there
            args, kwargs = first.pop()
            result = forward(*args, **kwargs)
            written.after(found)
            return result
        with default_dtype(dtype), found.in_place():  # a precision plugin sets the dtype for the forward alone
            return forward(*copied(again_args), **copied(again_kwargs))

    return checkpoint(run, *copied(args), **options, **copied(kwargs))


skip_code(_checkpointed.__code__)  # where a graph breaks in it, it runs as it is: nothing is compiled then


def _left_out_where_written(forward: Forward) -> Forward:
    """The forward as a compiler reads it, which leaves it out if it writes a tensor that it is given.

    A graph's backward recomputes from what memory holds then, written or not; outside of graphs recomputations find
    what the forward found.
    """

    def leave_out(context: ComptimeContext) -> None:
        memory = [
            (node.op == "placeholder", each._version, each.untyped_storage()._cdata)
            for node in context.graph().nodes
            for each in tensors_of(node.meta.get("example_value"))
            if each.layout == torch.strided
        ]
        written = {place for _, version, place in memory if version}  # a version of a tensor, or of a view of it
        if any(is_given and place in written for is_given, _, place in memory):
            context.graph_break("a forward that is recomputed writes a tensor that lives on")

    def run(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        comptime(leave_out)
        return result

    return run


def copied(value: Any) -> Any:
    """Lists, dicts and sets as they are now, with what is in them."""
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(member) for key, member in value.items()}
    return set(value) if type(value) is set else value


# where a graph breaks beside it, a compiler would read this bookkeeping, which knows tensors of other devices
not_compiled = cast(Callable[[F], F], torch.compiler.disable)


@dataclass
class Found:
    """What a forward found, for its recomputations."""

    buffers: list[tuple[dict[str, Any], str, Tensor]]  # tables of buffers that the block may write, names, and copies
    # tables, names, and what stands there, as `functional_call` puts it; none that techniques put there
    parameters: list[tuple[dict[str, Any], str, Tensor]]
    # of buffers, by their module; of parameters, by their path; of inputs
    versions: list[tuple[nn.Module | str, Tensor, int]]
    # of parameters, copies before the block's first forward: a write to `weight.data` counts as no version
    values: list[tuple[str, Tensor, Tensor]]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the block has what was found; afterwards what it has now."""
        with _disable_current_modes():  # selective recomputation looks for every operation in the block's forward
            places = [(table, name, table[name], kept.clone()) for table, name, kept in self.buffers]
        places += [(table, name, table[name], kept) for table, name, kept in self.parameters if table[name] is not kept]
        for table, name, _, kept in places:
            table[name] = kept
        try:
            yield
        finally:
            for table, name, now, _ in places:
                table[name] = now


class Written:
    """Watches what the forward of a block writes that is recomputed."""

    def __init__(self, block: nn.Module) -> None:
        self._kind = type(block).__name__
        self._parts = [(path, part) for path, part in block.named_modules() if part._parameters or part._buffers]
        self._writers: set[nn.Module] | None = None
        """Modules that were seen to write buffers; None before the first forward, which copies all."""

    @not_compiled
    def before(self, inputs: Any) -> Found:
        """What the block finds that is about to get these inputs."""
        found = Found([], [], [], [])
        for path, part in self._parts:
            for name, each in part._parameters.items():
                if each is None:
                    continue
                own, fqn = _memory(each), f"{path}.{name}".lstrip(".")
                found.versions.append((fqn, own, own._version))
                if self._writers is None and not own.is_meta:
                    found.values.append((fqn, own.detach(), own.detach().clone()))
                if type(each) is nn.Parameter or not isinstance(each, nn.Parameter):
                    found.parameters.append((part._parameters, name, each))
            found.versions += [(part, each, each._version) for each in part._buffers.values() if each is not None]
            if self._writers is None or part in self._writers:
                found.buffers += _copies(part)
        found.versions += [("what it is given", own, own._version) for own in map(_memory, tensors_of(inputs))]
        return found

    @not_compiled
    def after(self, found: Found) -> None:
        """The forward has run that found this.

        Raises:
            ValueError: it wrote parameters or inputs.
        """
        changed = [what for what, own, version in found.versions if own._version != version]
        names = [what for what in changed if isinstance(what, str)]
        for path, own, value in found.values:
            if own.shape == value.shape and not torch.equal(own.nan_to_num(), value.nan_to_num()):
                names.append(path)
        if names:
            raise ValueError(
                f"{self._kind} writes to {', '.join(dict.fromkeys(names))} in its forward: ActivationCheckpoint would "
                "recompute from what is written. Make a new tensor, as x = x + y in place of x += y; write parameters "
                "in the step or a hook, as on_train_batch_end; or train without ActivationCheckpoint"
            )
        # Kernels of norms write statistics without counting that as a version, but they count batches beside them. A
        # buffer may be another tensor now.
        before = {id(own) for _, own, _ in found.versions}
        writers = {what for what in changed if isinstance(what, nn.Module)}
        for _, part in self._parts:
            if any(each is not None and id(each) not in before for each in part._buffers.values()):
                writers.add(part)
        if self._writers is not None:  # written for the first time: its recomputation finds what was written
            found.buffers += [copy for part in writers - self._writers for copy in _copies(part)]
        self._writers = writers | (self._writers or set())
        found.versions, found.values = [], []


def _copies(part: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    buffers = part._buffers
    return [(buffers, name, each.detach().clone()) for name, each in buffers.items() if each is not None]


def _memory(tensor: Any) -> Tensor:
    """What a rank has of a tensor."""
    computes = computing(tensor)
    own: Tensor = computes.own if isinstance(computes, Divided) else local(tensor)
    return own
