"""A bucket: some parameters whose gradients travel in one message, and the bucket that averages them in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.collectives.functional import Pending, all_reduce
from lightning_parallel.techniques.tools.holders import Holders
from lightning_parallel.techniques.tools.shards import as_gradient, local

TOGETHER, SMALL_BYTES = 16, 2**16
"""So many gradients of at most this size are moved into a message at once: alone, each costs more calls than bytes."""


class Bucket(ABC):
    """Some parameters whose gradients travel in one message, which is made anew in every backward pass.

    With the gradients travels one flag per parameter that says whether this rank had a gradient for it: a parameter
    that no rank used must end with `grad = None`, as it does on one device, or weight decay would move it.

    | call       | in a backward                                                       |
    | ---------- | ------------------------------------------------------------------- |
    | `begin`    | all gradients are pending                                           |
    | `receive`  | a gradient arrived as `grad`; sooner or later it is in the message  |
    | `send`     | the message is under way, with zeros for what is still pending      |
    | `wait`     | some buckets later                                                  |
    | `finalize` | all parameters have what was reduced                                |

    Args:
        parameters: of one dtype and device, held by the same ranks.
        holders: of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], holders: Holders) -> None:
        self.parameters, self.dtype = list(parameters), parameters[0].dtype
        self._computed, self._given = holders.scale, 1 / holders.all.size()
        self.scale = self._computed
        """By what each rank's gradients are multiplied before they are summed."""
        self.pending: set[int] = set()
        self.active = False
        self.synced = True
        self._small = [local(parameter.detach()).nbytes <= SMALL_BYTES for parameter in self.parameters]
        self._small_ready: list[int] = []  # these lie where they arrived
        self._unused: list[int] = []  # parameters for which this rank has no gradient

    def begin(self, synced: bool, given: bool = False) -> None:
        """Before the first gradient; a bucket of frozen parameters stays out of it.

        Args:
            synced: whether gradients are those of the global batch after it; else a later pass will see to that.
            given: whether the step gave them, so that they become means over the ranks that hold the parameters: where
                they are such already, they stay the same.
        """
        self.scale = self._given if given else self._computed
        self.synced = synced
        self.pending = {index for index, parameter in enumerate(self.parameters) if parameter.requires_grad}
        self._small_ready = []
        self.active = bool(self.pending)

    def receive(self, index: int) -> None:
        """The gradient of one parameter is complete."""
        if index not in self.pending:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.parameters[index].shape)} got a second gradient in one "
                "backward pass; functions of autograd do this that run another one within their own: for activation "
                "checkpointing, call checkpoint(..., use_reentrant=False); in a reversible layer, return what "
                "torch.autograd.grad gives for its parameters, which are inputs of the function"
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
        """Starts the reduction; parameters without a new gradient take part with the one they have, or with zeros."""
        late = [i for i, parameter in enumerate(self.parameters) if i in self.pending or not parameter.requires_grad]
        self._unused = [index for index in late if self.parameters[index].grad is None]
        if self._small_ready:
            self._put(self._small_ready)
            self._small_ready = []
        for index in late:
            self._put([index])
        self.start()

    def _put(self, indices: Sequence[int]) -> None:
        """Moves what parameters have for `grad` into the message, zeros for those that have none."""
        views, arrived = list[Tensor](), list[Tensor]()
        for index, view in zip(indices, self.views(indices), strict=True):
            gradient = self.parameters[index].grad
            if gradient is not None and gradient.is_sparse:
                raise TypeError(
                    "sparse gradients (Embedding(sparse=True)) cannot be reduced in buckets; use sparse=False"
                )
            own = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            if own is None or view is None or len(indices) == 1:
                self.copy_in(index, own)
            else:
                views.append(view)
                arrived.append(own.reshape(view.shape))
        if views:
            torch._foreach_copy_(views, arrived)
            # on the host a number becomes a tensor in each call; in half precision the tensor would be rounded
            on_host = views[0].is_cpu and self.dtype.itemsize >= 4
            scale = torch.tensor(self.scale, dtype=views[0].dtype) if on_host else self.scale
            torch._foreach_mul_(views, scale)
        self.after_copy(indices)

    @abstractmethod
    def views(self, indices: Sequence[int]) -> Sequence[Tensor | None]:
        """Where all elements of gradients lie in the message, in their order; None for one with padding in it."""

    @abstractmethod
    def copy_in(self, index: int, gradient: Tensor | None) -> None:
        """Copies a gradient of what this rank keeps of a parameter into the message, or zeros."""

    @abstractmethod
    def after_copy(self, indices: Sequence[int]) -> None:
        """What parameters had for `grad` is in the message."""

    @abstractmethod
    def start(self) -> None:
        """Starts the collective, with flags that name the parameters for which this rank has no gradient."""

    def wait(self) -> None:  # noqa: B027
        """Some buckets later: waits for the collective, frees the message and starts what must follow, if anything."""

    @abstractmethod
    def finalize(self) -> None:
        """Waits for the collective and gives every parameter its reduced gradient."""

    def before_accumulating(self) -> None:  # noqa: B027
        """Before gradients grow in any pass: those that are reduced stay the same when they are reduced once more."""


class AllReduceBucket(Bucket):
    """A bucket whose gradients are averaged in place: afterwards they are parts of the message.

    Args:
        parameters: see `Bucket`.
        holders: of the parameters.
        reduce_dtype: in which the message is sent and summed; None for that of the parameters.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], holders: Holders, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(parameters, holders)
        self._group, self._reduce_dtype = holders.all.get_group(), reduce_dtype
        # 1 where all ranks hold the parameters: the mean of means is the same
        self._again = 1 / (holders.scale * holders.all.size())
        self._reduced = False
        self._message: Tensor | None = None
        self._views: list[Tensor] = []
        self._sent = Pending(None)
        self._shapes = [local(parameter.detach()).shape for parameter in self.parameters]  # in a step they look whole
        self._sizes = [*(shape.numel() for shape in self._shapes), len(self.parameters)]

    def begin(self, synced: bool, given: bool = False) -> None:
        """See `Bucket.begin`."""
        super().begin(synced, given)
        self._message = None
        if self.active and not given:
            self.before_accumulating()

    def before_accumulating(self) -> None:
        """See `Bucket.before_accumulating`."""
        if self._reduced and self._again != 1:
            for gradient in (parameter.grad for parameter in self.parameters):
                if gradient is not None:
                    local(gradient).mul_(self._again)
        self._reduced = False

    def views(self, indices: Sequence[int]) -> Sequence[Tensor | None]:
        """See `Bucket.views`."""
        if self._message is None:
            first = local(self.parameters[0].detach())
            self._message = torch.empty(sum(self._sizes), dtype=self.dtype, device=first.device)
            slots = torch.split(self._message, self._sizes)[:-1]  # each gradient, flat; behind them a flag for each
            # what is written to one gradient is no change of the others: each counts its own versions
            self._views = [slot.view(shape).data for slot, shape in zip(slots, self._shapes, strict=True)]
        return [self._views[index] for index in indices]

    def copy_in(self, index: int, gradient: Tensor | None) -> None:
        """See `Bucket.copy_in`."""
        if gradient is None:
            self._views[index].zero_()
        else:
            torch.mul(gradient, self.scale, out=self._views[index])

    def after_copy(self, indices: Sequence[int]) -> None:
        """See `Bucket.after_copy`. Gradients live in the message from now on, unless a module cast its parameter."""
        for index in indices:
            parameter = self.parameters[index]
            if parameter.grad is not None and parameter.dtype == self.dtype:
                parameter.grad = as_gradient(self._views[index], parameter)

    def start(self) -> None:
        """See `Bucket.start`."""
        assert self._message is not None
        message, flags = self._message, self._message[-len(self.parameters) :]
        flags.fill_(1)
        if self._unused:
            flags[self._unused] = 0
        sent = message if self._reduce_dtype is None else message.to(self._reduce_dtype)
        self._sent = all_reduce(sent, self._group)
        if sent is not message:
            self._sent = Pending(self._sent, lambda: message.copy_(sent))

    def finalize(self) -> None:
        """See `Bucket.finalize`."""
        self._sent.wait()
        self._reduced = True
        assert self._message is not None
        used = self._message[-len(self.parameters) :][self._unused].tolist() if self._unused else ()
        somewhere = dict(zip(self._unused, used, strict=True))
        for index, parameter in enumerate(self.parameters):
            if index in somewhere or parameter.dtype != self.dtype:
                reduced = as_gradient(self._views[index], parameter).to(parameter.dtype)
                parameter.grad = reduced if somewhere.get(index, True) else None
        self._message, self._views, self._sent = None, [], Pending(None)  # gradients keep it
