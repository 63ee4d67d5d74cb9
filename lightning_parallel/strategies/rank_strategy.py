"""A strategy as a set of processes: how they start, which rank is which, how they talk, and how they end together."""

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
from lightning_parallel.collectives.functional import begun_in, hang_up, within_reach
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
    """The processes of a run and the mesh that they form.

    Args:
        techniques: their axes give the mesh its sizes.
        accelerator: see Lightning; so are all that follow.
        parallel_devices: the devices of this node.
        cluster_environment: where ranks, addresses and sizes come from.
        checkpoint_io: how full checkpoints are written and read.
        checkpoint: "full", one plain file that everybody can read, or "sharded", to which every rank writes its part.
        async_save: whether training goes on while a checkpoint is written.
        resume: "auto" lets a fit without `ckpt_path` go on from the newest valid checkpoint.
        trust_checkpoint_code: whether checkpoints may run code while they are read.
        nonfinite: what follows a loss or gradient that is nan or infinite, before the optimizer would step by it:
            "stop" raises on all ranks, "skip" leaves the step out, "continue" does not look.
        precision_plugin: in what precision the model computes.
        process_group_backend: unless given "nccl" on GPUs, and "gloo" on CPUs and where ranks share a GPU, as they do
            with `parallel_devices=[torch.device("cuda", 0)] * 2`.
        timeout: how long a collective may wait.
        start_method: how processes are started where the environment has not started them.

    Raises:
        ValueError: sizes that do not fit each other or the world, or a backend that does not fit the devices, raised
            when the Trainer is made.
    """

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
        if start_method not in ("popen", "spawn", "fork"):
            raise ValueError(f"start_method={start_method!r} is none of 'popen', 'spawn', 'fork'")
        known = dist.Backend.backend_list
        if any(part.rpartition(":")[2] not in known for part in str(process_group_backend or "gloo").split(",")):
            raise ValueError(f"process_group_backend={process_group_backend!r} is none of {', '.join(known)}")
        if not (timeout is None or isinstance(timeout, timedelta)):
            raise TypeError(f"timeout={timeout!r} is no time; pass datetime.timedelta(minutes=10), or None")
        one_of("strategy", "nonfinite", nonfinite, get_args(Policy))
        self.techniques = tuple(sorted(techniques, key=attrgetter("order")))
        #: whether the user's code has gathered tensors of other ranks
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
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """How many ranks there are on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def world_size(self) -> int:
        """The number of ranks that user code sees: in steps and hooks the data-parallel ranks, elsewhere all ranks."""
        shares = self.mesh is not None and self.mesh.shares_samples and dist.is_initialized()
        return dist.get_world_size() if shares else super().world_size

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that read different samples."""
        return self._readers().ranks

    @property
    def data_parallel_rank(self) -> int:
        """This rank among those that read different samples; ranks that share a batch have the same."""
        return self._readers().rank

    @property
    def is_distributed(self) -> bool:
        """Whether there are other ranks; Lightning asks before it reduces what is logged."""
        return self.num_nodes * len(self.parallel_devices or ()) > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For users who make a DistributedSampler themselves: how many parts there are, which is this."""
        readers = self._readers()
        return {"num_replicas": readers.ranks, "rank": readers.rank}

    def set_world_ranks(self) -> None:
        """Tells the environment, and everything that speaks on rank 0 only, which rank this is."""
        environment = self._environment()
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        for module in (rank_zero, fabric_rank_zero):
            module.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        self._resolve_sizes(self.num_nodes * self.num_processes)
        backend_for(self.parallel_devices or (), self._backend)
        if self._checkpoints.in_parts and self._checkpoint_io is not None:
            raise ValueError(
                f"checkpoint='sharded' is written by all ranks, and {type(self._checkpoint_io).__name__} writes what "
                "one has; leave out the checkpoint_io (async_save=True writes in the background), or pass "
                "checkpoint='full'"
            )
        environment, start_method, summary = self._environment(), self._start_method, self._hang_summary
        if _IS_INTERACTIVE and start_method != "fork" and not environment.creates_processes_externally:
            how = "runs the script again" if start_method == "popen" else "imports the script anew"
            raise ValueError(
                f"start_method={start_method!r} {how} on every rank, but a notebook or a Python prompt is no script; "
                "pass start_method='fork' to the strategy (on GPUs, before anything in the notebook has used CUDA), or "
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

    def _environment(self) -> ClusterEnvironment:
        assert self.cluster_environment is not None
        return self.cluster_environment

    def setup_environment(self) -> None:
        """Joins the process group and builds the mesh."""
        super().setup_environment()
        if (launcher := self._launched_by) is not None:
            die_with(launcher)
        self.set_world_ranks()
        ranks, device = self._environment().world_size(), self.root_device
        if ranks != self.num_nodes * self.num_processes:
            raise ValueError(
                f"Trainer(devices={self.num_processes}, num_nodes={self.num_nodes}) makes "
                f"{self.num_nodes * self.num_processes} ranks, but the environment started {ranks}; make them equal"
            )
        backend = backend_for(self.parallel_devices or (), self._backend)
        bound = device if device.type == "cuda" and "nccl" in backend else None
        met = None
        if self.is_distributed and not dist.is_initialized():
            # names ranks that do not start, which torch would wait for without a word
            met = wait_for_all(self._environment(), self._timeout or default_pg_timeout)
        _init_dist_connection(self._environment(), backend, timeout=self._timeout, device_id=bound)
        if self._world is not dist.group.WORLD:
            self.mesh = ParallelMesh(self._resolve_sizes(dist.get_world_size()), device.type)
            # small messages of the host must wait neither for a device nor behind large messages
            backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
            self._world = dist.group.WORLD
            self._control = dist.new_group(backend=backends.get("cpu", "gloo"), timeout=self._timeout)
            del met  # the store of the group is another one
            self._saving = (
                dist.new_group(backend="gloo", timeout=self._timeout) if self._checkpoints.async_save else None
            )
        self._saver = Saver(self._checkpoints, self.checkpoint_io, self._host_group(), self._saving)
        if self.is_distributed:
            rank, ranks = self.global_rank, dist.get_world_size()
            self._failures = Failures(rank, ranks, self._begun)
            timeout = self._timeout or default_pg_timeout
            self._watchdog = Watchdog(rank, ranks, timeout, self._module().trainer, self._counts)
            # samplers draw the order of an epoch from the state of rank 0, from where the user's script stands
            self.broadcast(RandomState.now()).restore()

    # ---------------------------------------------------------------- how ranks talk

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A value reduced over the ranks that hold different samples, unless a group is given.

        Args:
            tensor: what is no tensor stays as it is.
            group: the ranks.
            reduce_op: mean (the default of Lightning, and None), sum, min, max or any `ReduceOp`.
        """
        if not isinstance(tensor, Tensor) or not self.is_distributed or not self._others_come("reduce"):
            return tensor
        group, name = group or self._mesh().loss.get_group(), reduce_op.lower() if isinstance(reduce_op, str) else None
        mean = reduce_op is None or name in ("mean", "avg")
        result = within_reach(tensor.detach().clone().contiguous(), group)
        if mean and not result.is_floating_point():
            result = result.to(torch.get_default_dtype())
        by_name: dict[Any, Any] = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        dist.all_reduce(result, op=dist.ReduceOp.SUM if mean else by_name[name] if name else reduce_op, group=group)
        return (result / group.size() if mean else result).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Whether all ranks (or any) of the world say yes."""
        if not self.is_distributed or not self._others_come("reduce_boolean_decision"):
            return decision
        # over all ranks, also those that share samples: a stop of one is a stop of all
        said = gather_objects(bool(decision), self._host_group())
        return sum(said) == len(said) if all else any(said)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of the ranks that hold different samples, unless a smaller group is given; see `rows_of_all`."""
        if not dist.is_initialized():
            return tensor
        # in a step the default group is that of the data-parallel ranks, see `ParallelMesh.users`
        everybody = (None, dist.group.WORLD, self._mesh().world)
        chosen = self._mesh().data.get_group() if group in everybody else group
        self.has_gathered = True
        with nullcontext() if sync_grads else torch.no_grad():
            return rows_of_all(within_reach(tensor, chosen), chosen).to(tensor.device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """An object of one rank, on all ranks."""
        if not self.is_distributed or self._control is None or not self._others_come("broadcast"):
            return obj
        values = [obj]
        dist.broadcast_object_list(values, src, group=self._host_group())
        return values[0]

    def barrier(self, name: str | None = None) -> None:
        """Waits for all ranks, unless this one failed and others did not."""
        if self._control is not None and self._others_come("barrier"):
            dist.barrier(group=self._control)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or one that writes atomically."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO(warns=not self._checkpoints.trust_code)
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Every rank opens what rank 0 chose, and nothing of it is used before all of it is verified."""
        path = self.broadcast(checkpoint_path)
        if self._saver is not None:
            self._saver.wait_to_read(path)
        torch.cuda.empty_cache()
        return load(path, self._checkpoints, self.checkpoint_io, weights_only, self._control)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Rank 0 removes it, once what is being saved is saved."""
        self._saves().remove(filepath)

    # ---------------------------------------------------------------- how they end

    def _others_come(self, what: str) -> bool:
        """Whether all ranks are there for what this one is about to do. False only where this rank's run has failed.

        Raises:
            RuntimeError: they are not, and the run goes on: the user's code handles an exception on some ranks only.
        """
        if self._failures is None or self._failures.all_come(what):
            return self.mesh is not None  # a process that only launched ranks holds nothing
        if not self._failures.alone and self._module().trainer.state.status != TrainerStatus.INTERRUPTED:
            raise RuntimeError(
                f"rank {self.global_rank} is at {what} while it handles an exception, and not all ranks have come "
                "there; handle the exception on all ranks alike, or do what needs all of them after the handler"
            )
        return False

    def _begun(self) -> dict[str, int] | None:
        return self._counts()

    def _counts(self) -> dict[str, int]:
        """The collectives that this rank has begun in its groups."""
        mesh = self._mesh()
        groups = [mesh.world, self._host_group(), mesh.data.get_group(), mesh.loss.get_group()]
        return {group.group_name: begun_in(group) for group in groups}

    def on_exception(self, exception: BaseException) -> None:
        """This rank failed. Where others did not, nobody may wait for it, and nobody it launched may stay behind."""
        report, behind = ("", "") if self._watchdog is None else (self._watchdog.stop(), self._hang_summary())
        add_note(exception, report)
        add_note(exception, "" if self._saver is None else self._saver.said_of_read(exception))
        internals.take_patches_back()
        # this rank may be the cause, or only find that another one left
        mine = Failure(self.global_rank, one_line(exception))
        first = mine if self._failures is None else self._failures.end(exception)
        if self._is_alone:
            hang_up(kept=self._saving)  # which a save may need that is under way
            if isinstance(self._launcher, (ScriptLauncher, ProcessLauncher)):
                end_children(self._launcher.procs)
        # what a backend reports when another rank has left
        consequence = any(word in mine.error.lower() for word in ("gloo", "nccl", "connection closed"))
        if first.rank != self.global_rank and consequence:
            exception.args = (str(first),)  # for scripts that catch it, too
        elif first.error != mine.error:  # else all fail alike, and each of them says why
            add_note(exception, str(first))
        add_note(exception, behind)  # last: torchrun and launchers end with it
        by_torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ
        if first.rank == self.global_rank and by_torchrun and isinstance(exception, Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(exception)  # torchrun prints it at the end

    def _hang_summary(self) -> str:
        """Of a rank that hangs: who is behind, in one line."""
        return "" if self._watchdog is None else self._watchdog.hang_summary()

    def teardown(self) -> None:
        """See Lightning."""
        if self._watchdog is not None:
            self._watchdog.stop()
        super().teardown()
        if self._launched_by is not None:
            die_with(None)

    @property
    def _launched_by(self) -> int | None:
        """The process id of the strategy's own launcher, if that launched this process."""
        if not isinstance(self.cluster_environment, LightningEnvironment):
            return None
        if self._start_method != "popen":
            parent = multiprocessing.parent_process()
            return None if parent is None else parent.pid
        return int(os.environ[LAUNCHER]) if self.local_rank > 0 and LAUNCHER in os.environ else None

    @property
    def _is_alone(self) -> bool:
        """Whether this rank failed and others did not, or nobody knows."""
        return self.is_distributed and (self._failures is None or self._failures.alone)

    # ---------------------------------------------------------------- what is there

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
