"""Hooks on modules of other stages: called again with what they got where these modules ran.

So what a model collects of all its layers, in a list, a context or an attribute, is there on the later stages too.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_parallel.techniques.observed.hooked import hooks_call, hooks_since, is_hooks_call, tables
from lightning_parallel.techniques.observed.positions import Call
from lightning_parallel.techniques.pipeline_parallel.cut import Cut
from lightning_parallel.techniques.pipeline_parallel.exchange import Unsent
from lightning_parallel.values import map_leaves, map_tensors

PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, Enum, torch.dtype, torch.device)


@dataclass
class Taken:
    """What the hooks of one call of a module got; `Unsent` for tensors that no later stage uses.

    Attributes:
        call: which call.
        module: its FQN.
        after: whether they ran after its forward.
        given: what it returned (None before its forward), its arguments, and those by name.
    """

    call: Call
    module: str
    after: bool
    given: tuple[Any, tuple[Any, ...], dict[str, Any]]


class Hooks:
    """The hooks of the modules within blocks and parts, if later stages use what they take.

    Args:
        modules: of the model, by FQN.
        made: where it is cut.
        device: where it runs.
    """

    def __init__(self, modules: Mapping[str, nn.Module], made: Cut, device: torch.device) -> None:
        self._wanted = {call: carried for call, carried in made.carried.items() if is_hooks_call(call)}
        self._modules = {name: modules[name] for name in made.seen.hooked} if self._wanted else {}
        self._device = device
        self._owner = ""
        self._taken: list[Taken] | None = None
        self._calls: Counter[str] = Counter()
        self._handles: list[RemovableHandle] = []
        for name, module in self._modules.items():
            before, after = _FirstHook(self, name, after=False), _FirstHook(self, name, after=True)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, prepend=True, with_kwargs=True))

    def close(self) -> None:
        """Takes this class's own hooks back."""
        for handle in self._handles:
            handle.remove()

    def noting(self, owner: str, taken: dict[str, list[Taken]]) -> AbstractContextManager[None]:
        """Inside a block or a part runs, and what hooks in it get is noted under its name."""
        return self._noting(owner, taken) if self._modules else nullcontext()

    @contextmanager
    def _noting(self, owner: str, taken: dict[str, list[Taken]]) -> Iterator[None]:
        self._owner, self._taken = owner, taken.setdefault(owner, [])
        self._calls.clear()
        try:
            yield
        finally:
            self._taken = None

    def note(self, name: str, after: bool, given: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
        """Notes what the hooks of a module are about to get."""
        if self._taken is None:  # a recomputation during backward, or a call outside of blocks and parts
            return
        self._calls[name] += not after
        if not any(_hooks_of(self._modules[name], after)):
            return
        call = hooks_call(self._owner, name, after, self._calls[name] - 1)
        wanted, number = self._wanted[call].numbers if call in self._wanted else frozenset(), count()
        kept = map_tensors(lambda tensor: tensor.clone() if next(number) in wanted else Unsent.of(tensor), given)
        self._taken.append(Taken(call, name, after, map_leaves(_sendable, kept)))

    def call_again(self, taken: Sequence[Taken], stage: int) -> None:
        """Calls hooks with what they got on an earlier stage, each with what those before it made of that."""
        for one in taken:
            copied = self._last(one) > stage  # a hook may change in place what goes on
            given = map_tensors(Tensor.clone, one.given) if copied else one.given
            output, args, kwargs = map_leaves(self._present, given)
            for hook, by_name in list(_hooks_of(self._modules[one.module], one.after)):
                result = hook(self._modules[one.module], args, *([kwargs] * by_name), *([output] * one.after))
                if result is None:
                    continue
                if one.after:
                    output = result
                elif by_name:
                    args, kwargs = result
                else:
                    args = result if isinstance(result, tuple) else (result,)

    def _present(self, leaf: Any) -> Any:
        if isinstance(leaf, Unsent):
            return torch.zeros((), dtype=leaf.dtype, device=self._device).expand(leaf.shape)
        return leaf

    def going_on(self, taken: Mapping[str, list[Taken]], stage: int) -> dict[str, list[Taken]]:
        """What hooks got, by blocks and calls of parts, without tensors that no stage after this one uses."""
        return {owner: [self._going_on(one, stage) for one in some] for owner, some in taken.items()}

    def _going_on(self, one: Taken, stage: int) -> Taken:
        return one if self._last(one) > stage else replace(one, given=map_tensors(Unsent.of, one.given))

    def _last(self, one: Taken) -> int:
        return self._wanted[one.call].last if one.call in self._wanted else 0

    @contextmanager
    def silent(self, module: nn.Module) -> Iterator[None]:
        """Inside, the hooks in a module do not run."""
        parts = [part for part in module.modules() if any(part is hooked for hooked in self._modules.values())]
        hooks = [(table, dict(table)) for part in parts for _, table, _ in tables(part)]
        for table, _ in hooks:
            table.clear()
        try:
            yield
        finally:
            for table, before in hooks:
                table.update(before)


class PassingHooks:
    """Hooks that a step registers and takes back at its end, which the earlier stages do not reach.

    Args:
        modules: of the model, by FQN.
        lasting: those on which a step leaves hooks to stay.
    """

    def __init__(self, modules: Mapping[str, nn.Module], lasting: Collection[str]) -> None:
        self._modules = [module for name, module in modules.items() if name not in lasting]

    def take_back(self, since: int) -> None:
        """Takes hooks back that came when PyTorch had counted `since` hooks: the step was left before it could."""
        for module in self._modules:
            for hooks, key in hooks_since(module, since):
                del hooks[key]


class _FirstHook:
    """A hook that runs before all others of its module."""

    def __init__(self, hooks: Hooks, name: str, after: bool) -> None:
        self._hooks, self._name, self._after = hooks, name, after

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        self._hooks.note(self._name, self._after, (output, args, kwargs))


def _hooks_of(module: nn.Module, after: bool) -> Iterator[tuple[Callable[..., Any], bool]]:
    """The user's and their libraries' hooks, and whether they get arguments by name."""
    for is_after, hooks, by_name in tables(module):
        for key, hook in hooks.items() if is_after == after else ():
            if not isinstance(hook, _FirstHook) and not _is_of_a_technique(hook):
                yield hook, key in by_name


def _is_of_a_technique(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("lightning_parallel.techniques.")


@dataclass(frozen=True)
class Withheld:
    """In the place of an object that stays on its stage."""

    kind: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask
            raise AttributeError(name)
        raise RuntimeError(
            f"{name} of a {self.kind} is used on another stage than the one that made it, where no object goes that "
            "holds tensors or cannot be pickled; return these tensors from the module (of Hugging Face models, a cache "
            "is left out by use_cache=False)"
        )


class _Finder(pickle.Pickler):
    """Goes through an object as pickle does, and looks for tensors."""

    found = False

    def persistent_id(self, value: Any) -> str | None:
        self.found |= isinstance(value, Tensor)
        return "tensor" if isinstance(value, Tensor) else None


def without_objects_with_tensors(value: Any) -> Any:
    """A value in which `Withheld` is in the place of objects that hold tensors, as caches of keys and values."""

    def kept(leaf: Any) -> Any:
        if isinstance(leaf, (*PLAIN, Unsent, Tensor)):
            return leaf
        finder = _Finder(io.BytesIO())
        try:
            finder.dump(leaf)
        except Exception:  # it cannot be sent at all
            finder.found = True
        return Withheld(type(leaf).__name__) if finder.found else leaf

    return map_leaves(kept, value)


def _sendable(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (*PLAIN, Unsent, Tensor)) else Withheld(type(leaf).__name__)
