"""Zeros in place of what another stage has: code that runs for its shapes may use them, code that counts may not.

The step that was looked at says what each stage needs. Another step, or the same one by another way, may need more: it
would go on with zeros. So one microbatch of every batch runs with an eye on where they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from lightning_parallel.techniques.observed.answers import REQUIRE
from lightning_parallel.techniques.tools.elsewhere import hidden_tensors, without_memory
from lightning_parallel.techniques.tools.shards import bear
from lightning_parallel.values import tensors_of

T = TypeVar("T", bound=Tensor)
DATA: Any = vars(torch._C.TensorBase)["data"].__set__
ABSENT = "_lightning_parallel_absent"

NEW = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
}
"""Functions that look at a tensor's shape, and make another one."""

AS = {"type_as", "expand_as", "view_as", "reshape_as", "to"}
"""Functions of a tensor that look at the shape or the dtype of another one."""

ABOUT = {"__get__", "requires_grad_"}
"""Functions that may return tensors, and look at no values."""

ASK = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__float__", "__int__", "__index__"),
    *("__array__", "__contains__"),
}
"""Functions that give values to Python, where they may go anywhere."""


def mark_absent(tensor: T, what: str) -> T:
    """Notes what a tensor stands for."""
    vars(tensor)[ABSENT] = what
    return tensor


def mark_hidden(model: nn.Module) -> None:
    """Notes of what stands for hidden tensors which ones these are."""
    for name in hidden_tensors(model):
        owner, _, key = name.rpartition(".")
        stand_in = vars(model.get_submodule(owner)).get(key)
        if isinstance(stand_in, Tensor):
            mark_absent(stand_in, name)


@contextmanager
def answering(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside, modules of which other stages have all parameters give to who asks for some what stands for them.

    Code asks for the first one to know its device or its dtype, as `module.device` of transformers does.
    """
    asked = list(modules)
    for module in asked:
        vars(module)["named_parameters"] = partial(_stand_ins, module, device)
    try:
        yield
    finally:
        for module in asked:
            vars(module).pop("named_parameters", None)


def _stand_ins(
    module: nn.Module, device: torch.device, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    make = without_memory(device)
    for name, twin in hidden_tensors(module).items():
        if isinstance(twin, nn.Parameter) and (recurse or "." not in name):
            stand_in = nn.Parameter(make(twin), twin.requires_grad)
            bear(stand_in, twin)
            yield f"{prefix}.{name}" if prefix else name, mark_absent(stand_in, name)


def absent_in(value: Any) -> str | None:
    """Finds what one of the tensors in a structure stands for, None if all are what they seem."""
    return next((vars(tensor)[ABSENT] for tensor in tensors_of(value) if ABSENT in vars(tensor)), None)


IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))}
"""Functions that change a tensor in place, beside those whose names tell."""


class AbsentReads(TorchFunctionMode):
    """While active, follows absent values through what is computed from them.

    Args:
        read: hears that one is read, what it stands for, and whether Python gets it.
        changed: hears of tensors that are about to be changed in place, or if it is only said whether they learn.
    """

    def __init__(self, read: Callable[[str, bool], None], changed: Callable[[list[Tensor], bool], None]) -> None:
        super().__init__()
        self._read, self._changed = read, changed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if torch.compiler.is_dynamo_compiling():  # in a block, for which it should rest
            return func(*args, **(kwargs or {}))
        kwargs, name = kwargs or {}, func.__name__
        if name in IN_PLACE or name[-1] == "_" or "out" in kwargs:
            self._tell_changed(func, name, args, kwargs)
        what = absent_in(_computed_with(name, args, kwargs))
        if what is None:
            return func(*args, **kwargs)
        if name in ASK:
            self._read(what, True)
        try:
            result = func(*args, **kwargs)
        except Exception:  # zeros may be what it does not take
            self._read(what, False)
            raise
        made = list(result) if name == "__iter__" else args[:1] if name == "__setitem__" else result
        if name not in ABOUT and any(True for _ in tensors_of(made)):
            self._read(what, False)
        for tensor in tensors_of(made):
            mark_absent(tensor, what)
        return iter(made) if name == "__iter__" else result

    def _tell_changed(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        flags = name == "requires_grad_" or func == REQUIRE
        if flags or name in IN_PLACE or name[-2:] != "__" or "out" in kwargs or func == DATA:
            self._changed(list(tensors_of((args[:1], kwargs.get("out")))), flags)

    def resting(self, *given: Any) -> AbstractContextManager[None]:
        """Inside it is not active, unless something that is given is absent, or somebody else's mode lies upon it."""
        active = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        return self._resting() if active and not absent_in(given) else nullcontext()

    @contextmanager
    def _resting(self) -> Iterator[None]:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]


def _computed_with(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments whose values a function uses."""
    if name in AS:
        return args[:1]
    return (
        (args[1:], {key: value for key, value in kwargs.items() if key != "input"}) if name in NEW else (args, kwargs)
    )
