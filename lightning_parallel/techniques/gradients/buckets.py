"""Reduction of gradients in buckets, while backward still computes the next gradients.

Shared by data parallel (all_reduce) and ZeRO-1/2 (reduce_scatter). Buckets are filled in the reverse order of the
parameters, roughly the order in which backward produces gradients. Every rank sends them in this order, so that ranks
call the same collectives even if their gradients arrive in different orders, or not at all.
Source: S. Li et al., PyTorch Distributed, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_parallel.collectives.functional import Pending, Waitable, all_reduce
from lightning_parallel.mesh import ParallelMesh
from lightning_parallel.techniques.step import Step, WrappedStep
from lightning_parallel.techniques.tools.holders import Holders, holders_of, require_equal_replicas
from lightning_parallel.techniques.tools.shards import as_shard, local, local_tensor_of

Compression = Literal["bf16", "fp16"]
REDUCE_DTYPES: dict[Compression | None, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

IN_FLIGHT = 2
"""Number of messages that may be in flight: more would hold more memory than they hide time."""


TOGETHER, SMALL_BYTES = 16, 2**16
"""Gradients of up to SMALL_BYTES are copied TOGETHER at a time: one by one, the calls cost more than the bytes."""


class Bucket:
    """Parameters whose gradients are sent in one message, which is allocated anew in every backward pass.

    This class averages gradients in place: afterwards they are views of the message. The message also has one flag per
    parameter, which tells whether this rank had a gradient for it: a parameter that no rank used must end with
    `grad = None`, as it does on one device, or weight decay would change it.

    | call       | in a backward pass                                                  |
    | ---------- | ------------------------------------------------------------------- |
    | `begin`    | all gradients are pending                                           |
    | `receive`  | a gradient is complete; copy it into the message, small ones later  |
    | `send`     | start the collective, with zeros for pending gradients              |
    | `wait`     | called some buckets later                                           |
    | `finalize` | set the reduced gradients of all parameters                         |

    Args:
        parameters: parameters of one dtype and device, held by the same ranks.
        holders: the ranks that hold the parameters.
        reduce_dtype: dtype in which the message is sent and summed; None for that of the parameters.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], holders: Holders, reduce_dtype: torch.dtype | None = None
    ) -> None:
        self.parameters, self.dtype = list(parameters), parameters[0].dtype
        self._group, self._reduce_dtype = holders.all.get_group(), reduce_dtype
        self._computed, self._given = holders.scale, 1 / holders.all.size()
        # factor of gradients before they are summed: `_computed` after a backward, `_given` if the user set them
        self.scale = self._computed
        # factor of reduced gradients before they are reduced once more, so that they stay the same; 1 if all ranks hold
        # the parameters: the mean of means is the same
        self._again = 1 / (holders.scale * holders.all.size())
        self.pending: set[int] = set()
        self.active, self.synced, self._reduced = False, True, False
        tensors = [local_tensor_of(parameter) for parameter in self.parameters]
        self._shapes, self._small = [each.shape for each in tensors], [each.nbytes <= SMALL_BYTES for each in tensors]
        self._sizes = [*(shape.numel() for shape in self._shapes), len(self.parameters)]
        self._small_ready: list[int] = []  # small complete gradients that are not in the message yet
        self._unused: list[int] = []  # parameters for which this rank has no gradient
        self._message: Tensor | None = None  # [gradients, one after the other, then a flag for each]
        self._views: list[Tensor] = []  # of the gradients in the message
        self._sent: Waitable = Pending(None)

    def begin(self, synced: bool, given: bool = False) -> None:
        """Prepare for a backward pass; a bucket of frozen parameters takes no part in it.

        Args:
            synced: whether gradients are those of the global batch after the pass; else a later pass reduces them.
            given: whether the step set the gradients itself. They become means over the ranks that hold the parameters;
                gradients that are such means already stay the same.
        """
        self.scale = self._given if given else self._computed
        self.synced = synced
        self.pending = {index for index, parameter in enumerate(self.parameters) if parameter.requires_grad}
        self.active, self._small_ready, self._message = bool(self.pending), [], None
        if self.active and not given:
            self.before_accumulating()

    def before_accumulating(self) -> None:
        """Scale reduced gradients before a pass accumulates into them, so that another reduction keeps their value."""
        if self._reduced and self._again != 1:
            for gradient in (parameter.grad for parameter in self.parameters):
                if gradient is not None:
                    local(gradient).mul_(self._again)
        self._reduced = False

    def receive(self, index: int) -> None:
        """Take the gradient of one parameter, which is complete, into the message."""
        if index not in self.pending:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.parameters[index].shape)} got a second gradient in one backward "
                "pass, as from an autograd.Function that runs another one inside its own. In activation checkpointing, "
                "call checkpoint(..., use_reentrant=False). In a reversible layer, pass parameters to the function as "
                "inputs, and return their gradients from torch.autograd.grad"
            )
        self.pending.discard(index)
        if not self._small[index]:
            self._put([index])
            return
        self._small_ready.append(index)
        if len(self._small_ready) == TOGETHER:
            self._put(self._small_ready)
            self._small_ready = []

    def send(self) -> None:
        """Start the collective; parameters without a new gradient contribute the one that they have, or zeros."""
        late = [i for i, parameter in enumerate(self.parameters) if i in self.pending or not parameter.requires_grad]
        self._unused = [index for index in late if self.parameters[index].grad is None]
        self._put(self._small_ready)
        for index in late:
            self._put([index])
        self._start()

    def _put(self, indices: Sequence[int]) -> None:
        """Copy the `grad` of parameters into the message, scaled; zeros for parameters without a gradient."""
        views, arrived = list[Tensor](), list[Tensor]()
        for index, view in zip(indices, self._slots(indices), strict=True):
            gradient = self.parameters[index].grad
            if gradient is not None and gradient.is_sparse:
                raise TypeError(
                    "sparse gradients (Embedding(sparse=True)) cannot be reduced in buckets; use sparse=False"
                )
            local_gradient = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            if local_gradient is None or view is None or len(indices) == 1:
                self._copy_in(index, local_gradient)
            else:
                views.append(view)
                arrived.append(local_gradient.reshape(view.shape))
        if views:
            torch._foreach_copy_(views, arrived)
            # on the host each call would convert a number to a tensor; in half precision the tensor would be rounded
            on_host = views[0].is_cpu and self.dtype.itemsize >= 4
            scale = torch.tensor(self.scale, dtype=views[0].dtype) if on_host else self.scale
            torch._foreach_mul_(views, scale)
        self._after_copy(indices)

    def _slots(self, indices: Sequence[int]) -> Sequence[Tensor | None]:
        """Return the views of the message for gradients; None for a gradient that is not contiguous in the message."""
        if self._message is None:
            first = local_tensor_of(self.parameters[0])
            self._message = torch.empty(sum(self._sizes), dtype=self.dtype, device=first.device)
            slots = torch.split(self._message, self._sizes)[:-1]
            # `.data`: each gradient has its own version counter, so that a write to one does not change the others'
            self._views = [slot.view(shape).data for slot, shape in zip(slots, self._shapes, strict=True)]
        return [self._views[index] for index in indices]

    def _copy_in(self, index: int, gradient: Tensor | None) -> None:
        """Copy the local gradient of one parameter into the message, scaled; zeros for None."""
        if gradient is None:
            self._views[index].zero_()
        else:
            torch.mul(gradient, self.scale, out=self._views[index])

    def _after_copy(self, indices: Sequence[int]) -> None:
        """Let `grad` be a view of the message from now on, unless the parameter was cast to another dtype."""
        for index in indices:
            parameter = self.parameters[index]
            if parameter.grad is not None and parameter.dtype == self.dtype:
                parameter.grad = as_shard(self._views[index], parameter)

    def _start(self) -> None:
        """Start the collective, with flag 0 for parameters for which this rank has no gradient, else 1."""
        assert self._message is not None
        message, flags = self._message, self._message[-len(self.parameters) :]
        flags.fill_(1)
        if self._unused:
            flags[self._unused] = 0
        sent = message if self._reduce_dtype is None else message.to(self._reduce_dtype)
        self._sent = all_reduce(sent, self._group)
        if sent is not message:
            self._sent = Pending(self._sent, message.copy_, sent)

    def wait(self) -> None:
        """Called some buckets later: start the second collective of buckets that need one; this class does not."""

    def finalize(self) -> None:
        """Wait for the collective and set the reduced gradient of every parameter."""
        self._sent.wait()
        self._reduced = True
        assert self._message is not None
        used = self._message[-len(self.parameters) :][self._unused].tolist() if self._unused else ()
        used_anywhere = dict(zip(self._unused, used, strict=True))
        for index, parameter in enumerate(self.parameters):
            if index in used_anywhere or parameter.dtype != self.dtype:
                reduced = as_shard(self._views[index], parameter).to(parameter.dtype)
                parameter.grad = reduced if used_anywhere.get(index, True) else None
        self._message, self._views, self._sent = None, [], Pending(None)  # gradients keep the memory


class UserSetGradients:
    """Tracks parameters whose gradients the user may have set: those stepped since the last backward pass.

    These gradients are averaged before the next step. If one is averaged already, as in two steps with one gradient,
    averaging keeps its value.
    """

    def __init__(self) -> None:
        self.stepped: set[int] | None = None
        """The `id` of parameters stepped since the last backward; None before the first: users may have set all."""

    def among(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether there are such among `parameters`, which are about to be stepped."""
        return self.stepped is None or not self.stepped.isdisjoint(map(id, parameters))

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that `parameters` are stepped now."""
        if self.stepped is not None:
            self.stepped.update(map(id, parameters))


class BucketedStep(WrappedStep):
    """Reduces the gradients of some parameters in buckets during backward.

    Args:
        inner: the step to wrap.
        parameters: those whose gradients are reduced; frozen ones join when they are unfrozen.
        mesh: determines which ranks hold a parameter.
        make_bucket: makes a bucket of parameters that have the same holders.
        bucket_bytes: maximum size of the gradients of one bucket.
        accumulates_locally: whether `unsynced` passes skip the reduction (ZeRO-2 reduces each, to keep only shards).
        replicas: parameters by name, whose replicas must be equal before the first backward.
        late: whether to send all messages when backward is over. Required if the inner step reduces gradients, too: a
            rank without a gradient for a parameter sends the bucket at the end, so the messages of the two steps would
            have different orders on different ranks.
    """

    def __init__(
        self,
        inner: Step,
        parameters: Iterable[nn.Parameter],
        mesh: ParallelMesh,
        make_bucket: Callable[[Sequence[nn.Parameter], Holders], Bucket],
        bucket_bytes: int,
        accumulates_locally: bool = True,
        replicas: Mapping[str, nn.Parameter] | None = None,
        late: bool = False,
    ) -> None:
        super().__init__(inner)
        self._late = late
        self.buckets: list[Bucket] = []
        self.places: dict[int, tuple[Bucket, int]] = {}  # by `id`: hashing a tensor calls Python code
        self._mesh, self._make_bucket = mesh, make_bucket
        self._bucket_bytes = bucket_bytes
        self._accumulates_locally, self._replicas = accumulates_locally, replicas
        self._waiting = list(parameters)
        self._handles: list[RemovableHandle] = []
        self._running = False
        self._given = UserSetGradients()
        self._active: list[Bucket] = []
        self._next = 0
        self._adopt_unfrozen()

    # ---------------------------------------------------------------- the step

    def backward(self, run: Callable[[], None]) -> None:
        """Run backward; the reduction starts with the first full bucket and is finished when this returns."""
        if self._replicas is not None:
            require_equal_replicas(self._replicas, self._mesh)
            self._replicas = None
        parameters = (parameter for bucket in self.buckets for parameter in bucket.parameters)
        if not self.synced and self._accumulates_locally and not any(map(has_shard, parameters)):
            for bucket in self.buckets:
                bucket.before_accumulating()
            return self.inner.backward(run)
        self._begin(given=run is no_op)
        try:
            if run is not no_op:
                self.inner.backward(run)
            self._finish()
        finally:
            self._running = False
        if run is not no_op:
            self._given.stepped = set()
        return None

    def average_user_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.average_user_gradients`. A no-op backward reduces the gradients that are in `grad`."""
        if self._given.among(parameters):
            self.backward(no_op)
        self.inner.average_user_gradients(parameters)

    def before_optimizer_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `Step.before_optimizer_step`."""
        self._given.step(parameters)
        self.inner.before_optimizer_step(parameters)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.inner.close()

    # ---------------------------------------------------------------- during backward

    def _begin(self, given: bool = False) -> None:
        self._adopt_unfrozen()
        for bucket in self.buckets:
            bucket.begin(self.synced, given)
        self._active = [bucket for bucket in self.buckets if bucket.active]
        self._next = 0
        self._running = True

    def _on_gradient(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        """Post-accumulate-grad hook of each parameter."""
        if parameter.grad is None:  # an autograd function, as of a pipeline, returned none for it
            return
        if not self._running:
            if not self.synced:
                return
            # The user called `loss.backward()` without the strategy: reduce gradients, too.
            self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket.receive(index)
        while not self._late and self._next < len(self._active) and not self._active[self._next].pending:
            self._send_next()

    def _send_next(self) -> None:
        self._active[self._next].send()
        self._next += 1
        if self._next > IN_FLIGHT:
            self._active[self._next - IN_FLIGHT - 1].wait()

    def _finish(self) -> None:
        while self._next < len(self._active):
            self._send_next()
        for bucket in self._active[-IN_FLIGHT:]:
            bucket.wait()
        for bucket in self._active:
            bucket.finalize()
        self._running = False

    # ---------------------------------------------------------------- buckets

    def _adopt_unfrozen(self) -> None:
        """Put unfrozen parameters into buckets, from the last to the first; by dtype, device, holders and size."""
        ready = [parameter for parameter in self._waiting if parameter.requires_grad]
        if not ready:
            return
        self._waiting = [parameter for parameter in self._waiting if not parameter.requires_grad]
        groups: list[tuple[list[nn.Parameter], Holders]] = []
        open_groups: dict[tuple[torch.dtype, torch.device, Holders], tuple[list[nn.Parameter], int]] = {}
        for parameter in reversed(ready):
            key = (parameter.dtype, parameter.device, holders_of(parameter, self._mesh))
            size = local_tensor_of(parameter).nbytes
            group, used = open_groups.get(key, ([], self._bucket_bytes))
            if used + size > self._bucket_bytes:
                group, used = [], 0
                groups.append((group, key[2]))
            group.append(parameter)
            open_groups[key] = (group, used + size)
        for group, holders in groups:
            bucket = self._make_bucket(group, holders)
            self.buckets.append(bucket)
            for index, parameter in enumerate(group):
                self.places[id(parameter)] = (bucket, index)
                register = cast(Callable[..., RemovableHandle], parameter.register_post_accumulate_grad_hook)
                self._handles.append(register(partial(self._on_gradient, bucket, index)))


def average_gradients(
    step: Step,
    parameters: Sequence[nn.Parameter],
    mesh: ParallelMesh,
    compression: Compression | None = None,
    bucket_mb: float = 25,
    replicas: Mapping[str, nn.Parameter] | None = None,
    late: bool = False,
) -> Step:
    """Wrap a step to average gradients over all ranks that hold their parameters and read different samples.

    Args:
        step: the step to wrap.
        parameters: those whose gradients are averaged; frozen ones join when they are unfrozen.
        mesh: determines which ranks hold a parameter.
        compression: dtype in which gradients are sent; None for their dtype.
        bucket_mb: maximum size of the gradients of one message, in MiB.
        replicas: see `BucketedStep`.
        late: see `BucketedStep`.
    """
    if mesh.loss.size() == 1 or not parameters:
        return step
    make_bucket = partial(Bucket, reduce_dtype=REDUCE_DTYPES.get(compression))
    return BucketedStep(step, parameters, mesh, make_bucket, int(bucket_mb * 2**20), replicas=replicas, late=late)


def no_op() -> None:
    """No-op backward pass: reduces the gradients that are already in `grad`."""


def has_shard(parameter: nn.Parameter) -> bool:
    """Return whether the gradient of a parameter is sharded along more axes than the parameter."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return isinstance(parameter.grad, DTensor) and parameter.grad.placements != placements
