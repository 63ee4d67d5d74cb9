"""The modules that `fully_shard` is given, around the user's.

It gathers the parameters of a module when its forward starts. Here two kinds of modules are given to it, and neither is
the user's own: a unit for some blocks, and one root around the whole step. So the user's modules keep their class, code
that reads a weight outside any forward (a tied head, a parameter of the LightningModule) finds it whole during the
step, and everything can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from lightning_parallel.techniques.tools.redirect import Forward

if TYPE_CHECKING:
    from lightning_parallel.techniques.zero.sharded.parameters import Kind
    from lightning_parallel.techniques.zero.sharded.reads import OutsideReads
    from lightning_parallel.techniques.zero.sharded.tables import Tables

T = TypeVar("T")


class Unit(nn.Module):
    """One block, with the forward that techniques before sharding gave it."""

    def __init__(self, block: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.block = block
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block on whole parameters."""
        return self._forward(*args, **kwargs)


class Shell(nn.Module):
    """The whole step once more, for parameters that other ranks share than those that share the root's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a step of the user's while these parameters are whole."""
        return run(*args, **kwargs)


class Root(nn.Module):
    """The whole step: what belongs to no unit is whole from its beginning to its end.

    Args:
        model: the user's.
        left_whole: parameters of it that are not sharded.
    """

    def __init__(self, model: nn.Module, left_whole: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.model, self.left_whole = model, left_whole
        self.units, self.shells = nn.ModuleList(), nn.ModuleList()
        self.fewer: dict[nn.Module, Kind] = {}
        """The modules whose parameters fewer ranks share than the root's."""
        self.reads: OutsideReads
        self.tables: Tables
        self.running = False
        self.in_backward = False
        self.before_forward_of: Callable[[nn.Module], None] = _nothing
        self.before_end: Callable[[], None] = _nothing

    def forward(self, run: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs a step of the user's while the root's parameters are whole."""
        self.running = True
        for shell in self.shells:
            run = partial(shell, run)
        try:
            with self.reads.watching():
                result = run(*args, **kwargs)
                self.before_end()
                return result
        except BaseException:
            self.tables.put_back()
            raise
        finally:
            self.running = False

    def drop(self) -> None:
        """Makes shards of what belongs to no unit, where it is whole."""
        for module in (self, *self.shells):
            module.set_reshard_after_forward(True, recurse=False)  # else nothing is done where a forward has failed
            module.reshard()
            module.set_reshard_after_forward(False, recurse=False)

    def gather(self) -> None:
        """Makes whole what belongs to no unit or is read outside of it, anew where it is whole already."""
        self.drop()
        for module in (self, *self.shells):
            module.unshard()
        self.reads.gather()

    def enter(self, module: nn.Module, run: Callable[..., Any]) -> Forward:
        """`run`, entering the root first when no step is running: for a forward called between steps.

        A forward during backward is a recomputation: there the parameters are whole too.
        """

        def entered(*args: Any, **kwargs: Any) -> Any:
            if not self.running and not self.in_backward:
                return self(run, *args, **kwargs)
            if self.running:
                self.before_forward_of(module)
            return run(*args, **kwargs)

        return entered


def _nothing(*_: nn.Module) -> None:
    pass


def entrances(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward users call: the model, its children, and members of its lists of modules.

    Those without parameters have nothing to gather; metrics among them cannot be looked up, as their hash changes.
    """
    found = [model]
    for child in model.children():
        if not any(True for _ in child.parameters()):
            continue
        found += entrances(child)[1:] if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found


def remove_hooks_of_state_dicts(root: nn.Module) -> None:
    """Takes hooks of `fully_shard` off the user's modules: states are made, loaded and copied as if they were alone."""
    for module in root.modules():
        kinds: tuple[dict[int, Any], ...] = (
            module._state_dict_pre_hooks,
            module._load_state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
        )
        for hooks in kinds:
            for key in [key for key, hook in hooks.items() if _is_of_fsdp(getattr(hook, "hook", hook))]:
                del hooks[key]


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
