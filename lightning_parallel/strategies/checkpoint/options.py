"""What a user says about checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_parallel.arguments import one_of, true_or_false
from lightning_parallel.strategies.lightning_package import CheckpointIO

Form = Literal["full", "sharded"]
Resume = Literal["auto"]


@dataclass(frozen=True)
class CheckpointOptions:
    """Arguments of every strategy.

    Args:
        form: "full": one plain file, which rank 0 writes; "sharded": a folder, to which every rank writes what it
            holds. Either is read on any layout.
        async_save: whether training goes on while a checkpoint is written.
        resume: "auto" lets a fit without `ckpt_path` go on from the newest valid checkpoint; None does not look.
        trust_code: whether a checkpoint may run code while it is read, as pickles can.
    """

    form: Form = "full"
    async_save: bool = False
    resume: Resume | None = None
    trust_code: bool = False

    @property
    def in_parts(self) -> bool:
        """Whether a checkpoint is made of what each rank has."""
        return self.form == "sharded"

    def __post_init__(self) -> None:
        one_of("strategy", "checkpoint", self.form, ("full", "sharded"))
        one_of("strategy", "resume", self.resume, ("auto", None))
        true_or_false("strategy", async_save=self.async_save, trust_checkpoint_code=self.trust_code)

    def require_own_io(self, given: CheckpointIO | None) -> None:
        """Raises ValueError for a user's own writer of files, which would write none."""
        if self.form == "sharded" and given is not None:
            raise ValueError(
                f"checkpoint='sharded' is written by all ranks, and {type(given).__name__} writes what one has; leave "
                "out the checkpoint_io (async_save=True writes in the background), or pass checkpoint='full'"
            )
