"""Names of the hub are found and made without reading anything, and what does not fit is told."""

import pytest
import torch

from lightning_parallel.checkpoint.damage import Damaged
from lightning_parallel.checkpoint.hub.names import Names, from_hub, joined, to_hub
from lightning_parallel.checkpoint.stored import StoredTensor

FUSED = Names("**.up", ("**.#.gate.weight", "**.#.up.weight"))
JOINED = Names("layers.*.qkv", ("h.*.q", "h.*.k", "h.*.v"))
STATE = {"a.b.up": torch.arange(24.0).view(2, 6, 2), "layers.3.qkv": torch.arange(6.0), "other": torch.ones(2)}


def test_there_and_back_is_the_same() -> None:
    hub = to_hub(STATE, [FUSED, JOINED])
    rows = [f"a.b.{row}.{part}.weight" for row in (0, 1) for part in ("gate", "up")]
    assert list(hub) == [*rows, "h.3.q", "h.3.k", "h.3.v", "other"]
    assert (hub["a.b.1.up.weight"] + 0).tolist() == STATE["a.b.up"][1, 3:].tolist()
    found = from_hub(hub, {name: tuple(tensor.shape) for name, tensor in STATE.items()}, [FUSED, JOINED])
    assert found.keys() == STATE.keys()
    assert all((found[name] + 0).equal(STATE[name]) for name in STATE)
    part = found["a.b.up"][1:, 2:4]
    assert isinstance(part, StoredTensor)
    assert part.read().equal(STATE["a.b.up"][1:, 2:4])


def test_what_does_not_fit_is_told() -> None:
    hub = to_hub(STATE, [FUSED, JOINED])
    shapes = {name: tuple(tensor.shape) for name, tensor in STATE.items()}
    with pytest.raises(Damaged, match=r"a\.b\.up is made of 4 tensors, and a\.b\.1\.gate\.weight is missing"):
        from_hub({name: it for name, it in hub.items() if name != "a.b.1.gate.weight"}, shapes, [FUSED])
    with pytest.raises(Damaged, match=r"h\.3\.k has the shape \(3,\), and the model needs \(2,\)"):
        from_hub(hub | {"h.3.k": torch.zeros(3)}, shapes, [JOINED])
    with pytest.raises(Damaged, match="different dtypes"):
        from_hub(hub | {"h.3.k": torch.zeros(2).double()}, shapes, [JOINED])
    with pytest.raises(Damaged, match=r"the 2 tensors that up is made of do not fill \(5,\)"):
        joined("up", (5,), [((0,), (3,), torch.zeros(3)), ((3,), (3,), torch.zeros(3))])
    with pytest.raises(ValueError, match="5 rows are no 3 equal parts"):
        to_hub({"layers.0.qkv": torch.zeros(5)}, [JOINED])
