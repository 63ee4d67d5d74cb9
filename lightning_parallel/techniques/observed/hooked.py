"""Hooks by which a model collects what its modules return, as hidden states, attentions and logits of routers.

A hook within a block, or within a part beside the blocks, runs where that runs. What it takes may be used behind a cut,
where it is called again with what it got; so in the observed step it gets tensors of its own, each of which tells to
which call of which module it belongs. Those that a hook returns go on as what they stand for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_parallel.techniques.observed.shapes import MARK, mark_of
from lightning_parallel.values import map_tensors, tensors_of


def hooks_call(owner: str, module: str, after: bool, number: int) -> tuple[str, int]:
    """The name of what the hooks of one call of a module got.

    Args:
        owner: the block, or the call of a part, within which that was.
        module: its FQN.
        after: whether they ran after its forward.
        number: how many calls of the module were before within the owner.
    """
    return f"{owner} {module} {'after' if after else 'before'}", number


def owner_of_part(name: str, number: int) -> str:
    """The name of one call of a part beside the blocks."""
    return f"{name}#{number}"


def is_hooks_call(call: tuple[str, int]) -> bool:
    """Whether a call is that of hooks, not of a module."""
    return " " in call[0]


def tables(module: nn.Module) -> Iterator[tuple[bool, MutableMapping[int, Callable[..., Any]], Mapping[int, bool]]]:
    """The hooks of a module before and after its forward, and which of them get arguments by name."""
    yield False, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    yield True, module._forward_hooks, module._forward_hooks_with_kwargs


def hooks_since(module: nn.Module, since: int) -> Iterator[tuple[MutableMapping[int, Any], int]]:
    """The hooks of a module that came when PyTorch had counted `since` hooks: each in which table, and its key."""
    for hooks in (
        *(module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks),
        *(
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks_always_called,
        ),
    ):
        yield from [(hooks, key) for key in hooks if key >= since]


class WatchedHooks:
    """Gives hooks tensors of their own while a step is observed.

    Args:
        model: whose hooks.
        mark: makes the mark of a tensor, of the name of a call, the tensor's number in what hooks got, and its shape.
        returned: notes what a module returned, where hooks made something else of it; returns what goes on.

    Attributes:
        running: whether a hook runs now. What it makes, it makes again wherever it is called again.
        modules: the FQN of the modules whose hooks ran.
        lasting: the FQN of the modules on which the step left hooks; known once this is closed.
    """

    def __init__(
        self,
        model: nn.Module,
        mark: Callable[[tuple[str, int], int, torch.Size], Any],
        returned: Callable[[str, Any], Any],
    ) -> None:
        self.running = False
        self.modules: dict[str, None] = {}
        self.lasting: tuple[str, ...] = ()
        self._model, self._since = model, RemovableHandle.next_id
        self._mark, self._returned, self._owner, self._silent = mark, returned, "", False
        self._calls: Counter[str] = Counter()
        self._originals: Any = WeakIdKeyDictionary()
        self._now: _OneCall | None = None
        self._replaced: list[tuple[MutableMapping[int, Callable[..., Any]], int, Callable[..., Any]]] = []
        for name, module in model.named_modules():
            self._replace(module, name)

    def enter(self, owner: str) -> None:
        """A block or a part begins."""
        self._owner, self._now = owner, None
        self._calls.clear()

    def leave(self) -> None:
        """The block or the part has ended."""
        self._owner, self._now = "", None

    def watch(self, module: nn.Module, name: str) -> None:
        """A module is about to be called; hooks may have come to it since the step began."""
        self._calls[name] += 1
        self._replace(module, name)

    def _replace(self, module: nn.Module, name: str) -> None:
        for after, hooks, _ in tables(module):
            for key, hook in hooks.items():
                if not isinstance(hook, _Watched):
                    self._replaced.append((hooks, key, hook))
                    hooks[key] = _Watched(self, hook, name, after, hooks)

    def close(self) -> None:
        """Puts the hooks back."""
        for hooks, key, hook in self._replaced:
            if key in hooks:
                hooks[key] = hook
        modules = self._model.named_modules()
        self.lasting = tuple(name for name, module in modules if any(hooks_since(module, self._since)))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside, hooks do not run: a block is called once more than a step would call it."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def original(self, twin: Tensor) -> Tensor | None:
        """What a hook's own tensor stands for; None for any other tensor."""
        original: Tensor | None = self._originals.get(twin)
        return original

    def call(self, watched: _Watched, module: nn.Module, *given: Any) -> Any:
        """Calls a hook with what it is given, in tensors of its own."""
        if self._silent:
            return None
        if not self._owner:
            return watched.hook(module, *given)
        name, after = watched.name, watched.after
        self.modules[name] = None
        # What the module returned comes first, so that a tensor has one number for hooks with and without names.
        *first, last = given
        ordered = [last, *first] if after else list(given)
        now = self._call_now(hooks_call(self._owner, name, after, self._calls[name] - 1))
        twins = map_tensors(lambda tensor: self._twin(tensor, now), ordered)
        now.is_first = False
        self.running = True
        try:
            result = watched.hook(module, *([*twins[1:], twins[0]] if after else twins))
        finally:
            self.running = False
        result = _with_originals(result, dict(zip(map(id, tensors_of(twins)), tensors_of(ordered), strict=True)))
        now.changed = now.changed or (result is not None and result is not last)
        if not (after and now.changed and watched.is_last):
            return result
        return self._returned(name, last if result is None else result)

    def _call_now(self, call: tuple[str, int]) -> _OneCall:
        if self._now is None or self._now.call != call:
            self._now = _OneCall(call)
        return self._now

    def _twin(self, tensor: Tensor, now: _OneCall) -> Tensor:
        with _disable_current_modes():
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        made = now.made_by_hooks(tensor)
        vars(twin)[MARK] = self._mark(now.call, now.number(tensor), tensor.shape) if made is None else made
        self._originals[twin] = tensor
        return twin


def _with_originals(result: Any, originals: Mapping[int, Tensor]) -> Any:
    """What a hook returned, with what its own tensors stand for in their places; `originals` by the ids of these."""
    if not any(id(tensor) in originals for tensor in tensors_of(result)):
        return result
    return map_tensors(lambda tensor: originals.get(id(tensor), tensor), result)


class _OneCall:
    """The hooks of one call of a module, each of which may change what the next one gets.

    Args:
        call: its name.

    Attributes:
        is_first: whether none of them has been called.
        changed: whether one returned something new.
    """

    def __init__(self, call: tuple[str, int]) -> None:
        self.call, self.is_first, self.changed = call, True, False
        self._given: list[Tensor] = []

    def made_by_hooks(self, tensor: Tensor) -> Any:
        """The mark of a tensor that earlier ones returned, who make it again when they are called again; or None."""
        made = None if self.is_first or any(each is tensor for each in self._given) else mark_of(tensor)
        return made if made is not None and any(is_hooks_call(source.call) for source in made.sources or ()) else None

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor in what the first one got; a number after those for any other tensor."""
        known = [number for number, each in enumerate(self._given) if each is tensor]
        if known and not self.is_first:
            return known[0]
        self._given.append(tensor)
        return len(self._given) - 1


class _Watched:
    """Stands in the place of a hook.

    Args:
        watched: calls it.
        hook: the hook.
        name: the FQN of its module.
        after: whether it runs after the module's forward.
        hooks: the table in which it stands.
    """

    def __init__(
        self, watched: WatchedHooks, hook: Callable[..., Any], name: str, after: bool, hooks: MutableMapping[int, Any]
    ) -> None:
        self.hook, self.name, self.after = hook, name, after
        self._watched, self._hooks = watched, hooks

    @property
    def is_last(self) -> bool:
        """Whether no other hook of the module runs after this one."""
        return next(reversed(list(self._hooks.values())), None) is self

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        return self._watched.call(self, module, *given)
