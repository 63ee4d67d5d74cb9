"""Encode plain values as JSON, with their tensors set apart. Decoding cannot run code."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MARK = "!"
"""Key of a JSON object that represents no dictionary with string keys: {"!": "tuple", "v": [1, 2]}."""

TENSORS: tuple[type, ...] = (Tensor, nn.Parameter, DTensor)
FACTORIES: dict[str | None, Any] = {None: None}
FACTORIES |= {factory.__name__: factory for factory in (int, float, str, list, dict, set)}
MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter", defaultdict: "default"}


def _sorted(values: Any) -> list[Any]:
    return sorted(values, key=repr)


def _dtype(content: Any) -> torch.dtype:
    dtype = vars(torch).get(content)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{content!r} is not a dtype of torch {torch.__version__}")
    return dtype


KINDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: ("tuple", list, tuple),
    set: ("set", _sorted, set),
    frozenset: ("frozenset", _sorted, frozenset),
    float: ("float", repr, float),  # nan and inf
    complex: ("complex", lambda value: [repr(value.real), repr(value.imag)], lambda it: complex(*map(float, it))),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch."), _dtype),
    torch.device: ("device", str, torch.device),
}
"""By class: its name in JSON, the function that turns it into a list or a string, and the inverse function."""


class NotPlain(TypeError):  # noqa: N818
    """A value that only code could restore.

    Attributes:
        path: the keys that lead to the value.
    """

    def __init__(self, path: tuple[Any, ...], value: object) -> None:
        self.path = path
        where = "".join(f"[{key!r}]" for key in path)
        super().__init__(f"checkpoint{where} is a {type(value).__module__}.{type(value).__qualname__}, no plain value")


def encoded(value: Any, kinds: Collection[type] = TENSORS) -> tuple[Any, dict[str, Tensor]]:
    """Return a value as JSON-compatible values, and its tensors by the names that refer to them there.

    Args:
        value: any nested value.
        kinds: the classes of tensors that the caller can write.

    Raises:
        NotPlain: something in it is neither a tensor nor a number, a string or a container of Python's or NumPy's.
    """
    encoder = _Encoder(kinds)
    return encoder.encode(value, ()), encoder.tensors


def joined(path: tuple[Any, ...]) -> str:
    """Return the name of the tensor at a path of keys."""
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in path)


class _Encoder:
    def __init__(self, kinds: Collection[type]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._kinds = kinds

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in (bool, int, str, type(None)) or (kind is float and math.isfinite(value)):
            return value
        if kind is list:
            return [self.encode(item, (*path, index)) for index, item in enumerate(value)]
        if kind is dict and all(type(key) is str for key in value) and MARK not in value:
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        if not isinstance(value, (Tensor, np.ndarray, np.generic)):
            name, content = self._marked(value, kind, path)
            return {MARK: name, "v": content}
        try:
            tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        except (TypeError, ValueError):
            raise NotPlain(path, value) from None
        if type(tensor) not in self._kinds or tensor.layout != torch.strided or tensor.is_quantized:
            raise NotPlain(path, value)
        name = joined(path)
        while name in self.tensors:  # e.g. a dictionary with the keys 0 and "0"
            name += "~"
        self.tensors[name] = tensor.detach()
        mark = "tensor" if isinstance(value, Tensor) else "array" if kind is np.ndarray else "scalar"
        return {MARK: mark, "v": name}

    def _marked(self, value: Any, kind: type, path: tuple[Any, ...]) -> tuple[str, Any]:
        if isinstance(value, Path):
            return "path", str(value)
        if kind in MAPPINGS:
            pairs = [[self.encode(key, (*path, key)), self.encode(item, (*path, key))] for key, item in value.items()]
            if kind is not defaultdict:
                return MAPPINGS[kind], pairs
            for known, factory in FACTORIES.items():
                if value.default_factory is factory:
                    return MAPPINGS[kind], [known, pairs]
            raise NotPlain(path, value)
        if kind in KINDS:
            name, write, _ = KINDS[kind]
            return name, self.encode(write(value), path)
        raise NotPlain(path, value)


def decoded(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Invert `encoded`; `tensor` returns a tensor by its name."""
    if isinstance(tree, list):
        return [decoded(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if MARK not in tree:
        return {key: decoded(item, tensor) for key, item in tree.items()}
    kind, content = tree[MARK], tree.get("v")
    if kind in ("tensor", "array", "scalar"):
        value = tensor(str(content))
        return value if kind == "tensor" else value.numpy() if kind == "array" else value.numpy()[()]
    content = decoded(content, tensor)
    if kind == "default":
        factory, pairs = content
        return defaultdict(FACTORIES[factory], pairs)
    if kind not in _READ:
        raise ValueError(f"a value of kind {kind!r}, which this version cannot read")
    return _READ[kind](content)


_READ: dict[str, Callable[[Any], Any]] = {name: read for name, _, read in KINDS.values()} | {
    "path": Path,
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda content: Counter(dict(content)),
}
