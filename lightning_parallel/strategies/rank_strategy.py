"""The processes of a strategy: how they start, get their ranks, communicate, and end together."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from lightning_parallel.arguments import one_of
from lightning_parallel.collectives.functional import close_gloo_connections, count_collectives, to_group_device
from lightning_parallel.collectives.rows import rows_of_all
from lightning_parallel.mesh import Axis, ParallelMesh, resolve_sizes
from lightning_parallel.strategies import lightning_internals as internals
from lightning_parallel.strategies.checkpoint.reading import AtomicCheckpointIO, CheckpointOptions, Form, Resume, load
from lightning_parallel.strategies.checkpoint.saver import Saver
from lightning_parallel.strategies.data.loaders import DataSharding
from lightning_parallel.strategies.data.randomness import RandomState
from lightning_parallel.strategies.lightning_package import (
    _IS_INTERACTIVE,
    Accelerator,
    Callback,
    CheckpointIO,
    ClusterEnvironment,
    LightningEnvironment,
    LightningModule,
    Precision,
    StrategyOfPackage,
    TrainerStatus,
    _init_dist_connection,
    fabric_rank_zero,
    rank_zero,
)
from lightning_parallel.strategies.optimization import Policy
from lightning_parallel.strategies.ranks.agreement import gather_objects
from lightning_parallel.strategies.ranks.failures import Failure, Failures, one_line
from lightning_parallel.strategies.ranks.launchers import (
    LAUNCHER,
    ProcessLauncher,
    ScriptLauncher,
    backend_for,
    die_with,
    end_children,
    wait_for_all,
)
from lightning_parallel.strategies.ranks.watchdog import Watchdog
from lightning_parallel.techniques.technique import Technique
from lightning_parallel.values import add_note

T = TypeVar("T")

StartMethod = Literal["popen", "spawn", "fork"]


class RankStrategy(StrategyOfPackage):
    """Manages the processes of a run and the mesh that they form.

    Args:
        techniques: the mesh gets its sizes from their axes.
        accelerator: see Lightning.
        parallel_devices: the devices of this node, one per rank.
        cluster_environment: provides ranks, world size and the address of rank 0.
        checkpoint_io: writes and reads full checkpoints.
        checkpoint: "full" for one file that plain Lightning can read, or "sharded": every rank writes its shards.
        async_save: whether training goes on while a checkpoint is written.
        resume: "auto" resumes a fit without `ckpt_path` from the newest valid checkpoint.
        trust_checkpoint_code: whether reading a checkpoint may run code in it (pickle).
        nonfinite: what to do before an optimizer step if a loss or gradient is nan or infinite: "stop" raises on all
            ranks, "skip" drops the gradients, "continue" does not check.
        precision_plugin: the precision in which the model computes.
        process_group_backend: by default "nccl" on GPUs, and "gloo" on CPUs and where ranks share a GPU, as with
            `parallel_devices=[torch.device("cuda", 0)] * 2`.
        timeout: how long a collective may wait.
        start_method: how to start processes if the environment has not started them.

    Raises:
        ValueError: when the Trainer is made, if sizes do not fit each other or the world, or the backend does not fit
            the devices.
    """

    cluster_environment: ClusterEnvironment  # the Trainer sets one before it uses the strategy

    def __init__(
        self,
        techniques: Sequence[Technique] = (),
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        checkpoint: Form = "full",
        async_save: bool = False,
        resume: Resume | None = None,
        trust_checkpoint_code: bool = False,
        nonfinite: Policy = "stop",
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        known = dist.Backend.backend_list
        if any(part.rpartition(":")[2] not in known for part in str(process_group_backend or "gloo").split(",")):
            raise ValueError(f"process_group_backend={process_group_backend!r} is none of {', '.join(known)}")
        if not (timeout is None or isinstance(timeout, timedelta)):
            raise TypeError(f"timeout={timeout!r} is not a time; pass datetime.timedelta(minutes=10), or None")
        one_of("strategy", "start_method", start_method, get_args(StartMethod))
        one_of("strategy", "nonfinite", nonfinite, get_args(Policy))
        self.techniques = tuple(sorted(techniques, key=attrgetter("order")))
        #: whether the user's code has called `all_gather` since `StepRunner` set this to False
        self.has_gathered = False
        self.num_nodes = 1
        self._backend, self._timeout = process_group_backend, timeout
        self._policy, self._start_method = nonfinite, start_method
        self.mesh: ParallelMesh | None = None
        self._world: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        self._failures: Failures | None = None
        self._watchdog: Watchdog | None = None
        self._checkpoints = CheckpointOptions(checkpoint, async_save, resume, trust_checkpoint_code)
        self._saving: dist.ProcessGroup | None = None
        self._saver: Saver | None = None

    # ---------------------------------------------------------------- processes

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def world_size(self) -> int:
        """Size of the default process group: the data-parallel ranks in user steps and hooks, otherwise all ranks."""
        shares = self.mesh is not None and self.mesh.shares_samples and dist.is_initialized()
        return dist.get_world_size() if shares else super().world_size

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different samples."""
        return self._readers().ranks

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank among those that read different samples; ranks that read the same samples share one."""
        return self._readers().rank

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks; Lightning checks this before it reduces logged values."""
        return self.num_nodes * len(self.parallel_devices or ()) > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for a `DistributedSampler` that the user creates: `num_replicas` and `rank`."""
        readers = self._readers()
        return {"num_replicas": readers.ranks, "rank": readers.rank}

    def set_world_ranks(self) -> None:
        """Set this process's rank in the environment and in Lightning's `rank_zero_only` utilities."""
        environment = self.cluster_environment
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        for module in (rank_zero, fabric_rank_zero):
            module.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        self._resolve_sizes(self.num_nodes * self.num_processes)
        backend_for(self.parallel_devices or (), self._backend)
        if self._checkpoints.in_parts and self._checkpoint_io is not None:
            raise ValueError(
                f"checkpoint='sharded' is written by all ranks, but {type(self._checkpoint_io).__name__} writes what "
                "one rank has; leave out the checkpoint_io (async_save=True writes in the background), or pass "
                "checkpoint='full'"
            )
        environment, start_method, summary = self.cluster_environment, self._start_method, self._hang_summary
        if _IS_INTERACTIVE and start_method != "fork" and not environment.creates_processes_externally:
            how = "runs the script again" if start_method == "popen" else "imports the script anew"
            raise ValueError(
                f"start_method={start_method!r} {how} on every rank, but a notebook or a Python prompt is not a "
                "script; pass start_method='fork' to the strategy (on GPUs, before the notebook has used CUDA), or "
                "train on one device"
            )
        if start_method == "popen":
            self._launcher = ScriptLauncher(environment, self.num_processes, self.num_nodes, summary)
        else:
            self._launcher = ProcessLauncher(self, start_method, summary)

    def _resolve_sizes(self, world_size: int) -> dict[Axis, int]:
        sizes = resolve_sizes((technique.claim for technique in self.techniques), world_size)
        for technique in self.techniques:
            technique.check(sizes)
        return sizes

    def setup_environment(self) -> None:
        """Join the process group and build the mesh. Collective over all ranks."""
        super().setup_environment()
        if (launcher := self._launcher_pid) is not None:
            die_with(launcher)
        self.set_world_ranks()
        ranks, device = self.cluster_environment.world_size(), self.root_device
        if ranks != self.num_nodes * self.num_processes:
            raise ValueError(
                f"Trainer(devices={self.num_processes}, num_nodes={self.num_nodes}) makes "
                f"{self.num_nodes * self.num_processes} ranks, but the environment started {ranks}; make them equal"
            )
        backend = backend_for(self.parallel_devices or (), self._backend)
        bound = device if device.type == "cuda" and "nccl" in backend else None
        rendezvous = None
        if self.is_distributed and not dist.is_initialized():
            # reports ranks that have not started; torch would wait for them without a message
            rendezvous = wait_for_all(self.cluster_environment, self._timeout or default_pg_timeout)
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=bound)
        if self._world is not dist.group.WORLD:
            self.mesh = ParallelMesh(self._resolve_sizes(dist.get_world_size()), device.type)
            # a group of its own: small CPU messages must wait neither for a device nor behind large messages
            backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
            self._world = dist.group.WORLD
            self._control = dist.new_group(backend=backends.get("cpu", "gloo"), timeout=self._timeout)
            del rendezvous  # the process group has a store of its own
            if self._checkpoints.async_save:
                self._saving = dist.new_group(backend="gloo", timeout=self._timeout)
        self._saver = Saver(self._checkpoints, self.checkpoint_io, self._host_group(), self._saving)
        if self.is_distributed:
            rank, ranks = self.global_rank, dist.get_world_size()
            self._failures = Failures(rank, ranks, self._begun)
            timeout = self._timeout or default_pg_timeout
            self._watchdog = Watchdog(rank, ranks, timeout, self._module().trainer, self._counts)
            # samplers draw the order of an epoch from rank 0's random state at this point of the user's script
            self.broadcast(RandomState.now()).restore()

    # ---------------------------------------------------------------- collectives and checkpoints

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over `group`. Collective over its ranks.

        Args:
            tensor: anything that is not a tensor is returned as it is.
            group: by default the ranks that read different samples, or different parts of them (`mesh.loss`).
            reduce_op: "mean" (Lightning's default, also for None), "sum", "min", "max" or any `ReduceOp`.
        """
        if not isinstance(tensor, Tensor) or not self.is_distributed or not self._all_ranks_come("reduce"):
            return tensor
        group, name = group or self._mesh().loss.get_group(), reduce_op.lower() if isinstance(reduce_op, str) else None
        mean = reduce_op is None or name in ("mean", "avg")
        result = to_group_device(tensor.detach().clone().contiguous(), group)
        if mean and not result.is_floating_point():
            result = result.to(torch.get_default_dtype())
        by_name: dict[Any, Any] = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        dist.all_reduce(result, op=dist.ReduceOp.SUM if mean else by_name[name] if name else reduce_op, group=group)
        return (result / group.size() if mean else result).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Return whether `decision` is True on all ranks, or on any if not `all`. Collective over all ranks."""
        if not self.is_distributed or not self._all_ranks_come("reduce_boolean_decision"):
            return decision
        # over all ranks, not only those that read different samples: if one rank stops, all must stop
        decisions = gather_objects(bool(decision), self._host_group())
        return sum(decisions) == len(decisions) if all else any(decisions)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather tensors of ranks with different samples, or of a smaller `group`; see `rows_of_all`. Collective."""
        if not dist.is_initialized():
            return tensor
        # in a step the default group is that of the data-parallel ranks, see `ParallelMesh.users`
        default_groups = (None, dist.group.WORLD, self._mesh().world)
        ranks = self._mesh().data.get_group() if group in default_groups else group
        self.has_gathered = True
        with nullcontext() if sync_grads else torch.no_grad():
            return rows_of_all(to_group_device(tensor, ranks), ranks).to(tensor.device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src`. Collective over all ranks."""
        if not self.is_distributed or self._control is None or not self._all_ranks_come("broadcast"):
            return obj
        values = [obj]
        dist.broadcast_object_list(values, src, group=self._host_group())
        return values[0]

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, unless this rank failed and others did not. Collective over all ranks."""
        if self._control is not None and self._all_ranks_come("barrier"):
            dist.barrier(group=self._control)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's `CheckpointIO`, or one that writes files atomically."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO(warns=not self._checkpoints.trust_code)
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read rank 0's path on all ranks; nothing is used before all of it is verified. Collective over all ranks."""
        path = self.broadcast(checkpoint_path)
        if self._saver is not None:
            self._saver.wait_to_read(path)
        torch.cuda.empty_cache()
        return load(path, self._checkpoints, self.checkpoint_io, weights_only, self._control)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint on rank 0, after pending saves have finished."""
        self._saves().remove(filepath)

    # ---------------------------------------------------------------- failures and the end of a run

    def _all_ranks_come(self, what: str) -> bool:
        """Return whether all ranks come to a collective; False only if this rank's run has failed: skip collectives.

        Args:
            what: name of the collective, for the error.

        Raises:
            RuntimeError: other ranks do not come, although the run goes on: user code handles an exception that only
                some ranks raised.
        """
        if self._failures is None or self._failures.all_ranks_come(what):
            return self.mesh is not None  # a process that only launches ranks has no mesh
        if not self._failures.alone and self._module().trainer.state.status != TrainerStatus.INTERRUPTED:
            raise RuntimeError(
                f"rank {self.global_rank} calls {what} while it handles an exception, but not all ranks do; "
                "handle the exception the same way on all ranks, or do what needs all ranks after the handler"
            )
        return False

    def _begun(self) -> dict[str, int] | None:
        """Return `_counts`; None, in subclasses, where other ranks may wait for messages of this rank."""
        return self._counts()

    def _counts(self) -> dict[str, int]:
        """Return the number of collectives that this rank has begun, by name of its process groups."""
        mesh = self._mesh()
        groups = [mesh.world, self._host_group(), mesh.data.get_group(), mesh.loss.get_group()]
        return {group.group_name: count_collectives(group) for group in groups}

    def on_exception(self, exception: BaseException) -> None:
        """End this rank's run after a failure, and add what other ranks did to the exception.

        If others have not failed, close connections, so that no rank waits for this one, and end launched processes.
        """
        report, behind = ("", "") if self._watchdog is None else (self._watchdog.stop(), self._hang_summary())
        add_note(exception, report)
        add_note(exception, "" if self._saver is None else self._saver.checkpoint_note(exception))
        internals.restore_loader_classes()
        # this rank may be the cause, or only see that another rank has left
        mine = Failure(self.global_rank, one_line(exception))
        first = mine if self._failures is None else self._failures.end(exception)
        if self._is_alone:
            close_gloo_connections(kept=self._saving)  # a pending save may still need its group
            if isinstance(self._launcher, (ScriptLauncher, ProcessLauncher)):
                end_children(self._launcher.procs)
        # words in the errors of a backend when another rank has left
        is_consequence = any(word in mine.error.lower() for word in ("gloo", "nccl", "connection closed"))
        if first.rank != self.global_rank and is_consequence:
            exception.args = (str(first),)  # in place of the backend's text, also for scripts that catch the exception
        elif first.error != mine.error:  # if they are equal, all ranks failed for the same reason and report it
            add_note(exception, str(first))
        add_note(exception, behind)  # last: torchrun and launchers print the end of the text
        by_torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ
        if first.rank == self.global_rank and by_torchrun and isinstance(exception, Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(exception)  # torchrun prints it at the end

    def _hang_summary(self) -> str:
        """Return which rank is behind, in one line, if a hang goes on; else ""."""
        return "" if self._watchdog is None else self._watchdog.hang_summary()

    def teardown(self) -> None:
        """Stop the watchdog, then tear down as Lightning does."""
        if self._watchdog is not None:
            self._watchdog.stop()
        super().teardown()
        if self._launcher_pid is not None:
            die_with(None)

    @property
    def _launcher_pid(self) -> int | None:
        """Process id of the strategy's launcher; None if this process was started by something else."""
        if not isinstance(self.cluster_environment, LightningEnvironment):
            return None
        if self._start_method != "popen":
            parent = multiprocessing.parent_process()
            return None if parent is None else parent.pid
        return int(os.environ[LAUNCHER]) if self.local_rank > 0 and LAUNCHER in os.environ else None

    @property
    def _is_alone(self) -> bool:
        """Whether this rank failed and others did not, or it is unknown whether they did."""
        return self.is_distributed and (self._failures is None or self._failures.alone)

    # ---------------------------------------------------------------- accessors

    def _callbacks(self) -> list[Callback]:
        return internals.callbacks_of(self._module().trainer)

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _readers(self) -> DataSharding:
        data = self._mesh().data
        return DataSharding(data.size(), data.get_local_rank(), self._mesh().world_size // data.size())

    def _host_group(self) -> dist.ProcessGroup:
        assert self._control is not None
        return self._control

    def _saves(self) -> Saver:
        assert self._saver is not None
        return self._saver

    def _mesh(self) -> ParallelMesh:
        assert self.mesh is not None
        return self.mesh
