from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group in which this process is one of two ranks, and which sends nothing."""
    for name, value in {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
