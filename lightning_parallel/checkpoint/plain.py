"""Plain values as JSON, with the tensors among them set apart. Nothing that is read back can run code."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MARK = "!"
"""The key of JSON objects that stand for something else than a dictionary with names."""

FACTORIES = {"int": int, "float": float, "str": str, "list": list, "dict": dict, "set": set}
TENSORS: tuple[type, ...] = (Tensor, nn.Parameter, DTensor)


class NotPlain(TypeError):  # noqa: N818
    """A value that only code could bring back.

    Attributes:
        path: the keys that lead to it.
    """

    def __init__(self, path: tuple[Any, ...], value: object) -> None:
        self.path = path
        where = "".join(f"[{key!r}]" for key in path)
        super().__init__(f"checkpoint{where} is a {type(value).__module__}.{type(value).__qualname__}, no plain value")


def encoded(value: Any, kinds: Collection[type] = TENSORS) -> tuple[Any, dict[str, Tensor]]:
    """The value as JSON takes it, and its tensors under the names by which that calls them.

    Args:
        value: nested as you like.
        kinds: the classes of tensors that the caller knows how to write.

    Raises:
        NotPlain: something in it is neither a tensor nor a number, a string or a container of Python's or NumPy's.
    """
    encoder = _Encoder(kinds)
    return encoder.encode(value, ()), encoder.tensors


def decoded(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Takes `encoded` back; `tensor` finds a tensor by its name."""
    if isinstance(tree, list):
        return [decoded(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if MARK not in tree:
        return {key: decoded(item, tensor) for key, item in tree.items()}
    kind: Any = tree[MARK]
    content: Any = tree.get("v")
    if kind in ("tensor", "array", "scalar"):
        found = tensor(content)
        return found if kind == "tensor" else found.numpy() if kind == "array" else found.numpy()[()]
    if kind not in _DECODE:
        raise ValueError(f"a value of the kind {kind!r}, which this version does not know")
    return _DECODE[kind](content, lambda item: decoded(item, tensor))


def joined(path: tuple[Any, ...]) -> str:
    """The name of a tensor to which these keys lead."""
    return "/".join(str(key).replace("~", "~0").replace("/", "~1") for key in path)


class _Encoder:
    def __init__(self, kinds: Collection[type]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._kinds = kinds

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if _is_json(value):
            return value
        if kind is list:
            return [self.encode(item, (*path, index)) for index, item in enumerate(value)]
        if kind is dict and all(type(key) is str for key in value) and MARK not in value:
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (Tensor, np.ndarray, np.generic)):
            return self._values(value, path)
        return self._marked(value, path)

    def _values(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor):
            return {MARK: "tensor", "v": self._set_apart(value, path)}
        return {MARK: "array" if type(value) is np.ndarray else "scalar", "v": self._array(value, path)}

    def _marked(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if isinstance(value, Path):
            return {MARK: "path", "v": str(value)}
        if kind not in _ENCODE:
            raise NotPlain(path, value)
        name, content = _ENCODE[kind](value)
        if kind is defaultdict:
            content[0] = self._factory(value, path)
        return {MARK: name, "v": self._content(name, content, path)}

    def _content(self, name: str, content: Any, path: tuple[Any, ...]) -> Any:
        """The content of a marked value: of containers their items, encoded."""
        if name in ("tuple", "set", "frozenset"):
            return [self.encode(item, (*path, index)) for index, item in enumerate(content)]
        if name in ("dict", "ordered", "counter"):
            return list(self._pairs(content, path))
        return [content[0], list(self._pairs(content[1], path))] if name == "default" else content

    def _pairs(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Iterator[list[Any]]:
        for key, item in value.items():
            yield [self.encode(key, (*path, key)), self.encode(item, (*path, key))]

    def _factory(self, value: defaultdict[Any, Any], path: tuple[Any, ...]) -> str | None:
        if value.default_factory is None:
            return None
        for name, known in FACTORIES.items():
            if value.default_factory is known:
                return name
        raise NotPlain(path, value)

    def _array(self, value: Any, path: tuple[Any, ...]) -> str:
        try:
            return self._set_apart(torch.from_numpy(np.array(value)), path)
        except (TypeError, ValueError):
            raise NotPlain(path, value) from None

    def _set_apart(self, value: Tensor, path: tuple[Any, ...]) -> str:
        if type(value) not in self._kinds or value.layout != torch.strided or value.is_quantized:
            raise NotPlain(path, value)
        name = joined(path)
        while name in self.tensors:  # the keys 0 and "0" in one dictionary
            name += "~"
        self.tensors[name] = value.detach()
        return name


def _is_json(value: Any) -> bool:
    return type(value) in (bool, int, str, type(None)) or (type(value) is float and math.isfinite(value))


_ENCODE: dict[type, Callable[[Any], tuple[str, Any]]] = {
    float: lambda value: ("float", repr(value)),
    complex: lambda value: ("complex", [repr(value.real), repr(value.imag)]),
    bytes: lambda value: ("bytes", base64.b64encode(value).decode()),
    tuple: lambda value: ("tuple", value),
    set: lambda value: ("set", sorted(value, key=repr)),
    frozenset: lambda value: ("frozenset", sorted(value, key=repr)),
    dict: lambda value: ("dict", value),
    OrderedDict: lambda value: ("ordered", value),
    Counter: lambda value: ("counter", value),
    defaultdict: lambda value: ("default", ["", value]),
    torch.Size: lambda value: ("size", list(value)),
    torch.dtype: lambda value: ("dtype", str(value).removeprefix("torch.")),
    torch.device: lambda value: ("device", str(value)),
}

Decode = Callable[[Any], Any]


def _pairs(content: Any, decode: Decode) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in content}


def _default(content: Any, decode: Decode) -> defaultdict[Any, Any]:
    factory, pairs = content
    return defaultdict(None if factory is None else FACTORIES[factory], _pairs(pairs, decode))


def _dtype(content: Any, decode: Decode) -> torch.dtype:
    found = vars(torch).get(content)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{content!r} is no dtype of torch {torch.__version__}")
    return found


_DECODE: dict[str, Callable[[Any, Decode], Any]] = {
    "float": lambda content, decode: float(content),
    "complex": lambda content, decode: complex(float(content[0]), float(content[1])),
    "bytes": lambda content, decode: base64.b64decode(content),
    "path": lambda content, decode: Path(content),
    "tuple": lambda content, decode: tuple(map(decode, content)),
    "set": lambda content, decode: set(map(decode, content)),
    "frozenset": lambda content, decode: frozenset(map(decode, content)),
    "dict": _pairs,
    "ordered": lambda content, decode: OrderedDict(_pairs(content, decode)),
    "counter": lambda content, decode: Counter(_pairs(content, decode)),
    "default": _default,
    "size": lambda content, decode: torch.Size(content),
    "dtype": _dtype,
    "device": lambda content, decode: torch.device(content),
}
