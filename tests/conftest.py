import pytest
import torch

from tests.ranks import ALONE, POOL

UPSTREAM = [
    "ignore:.*isinstance.treespec, LeafSpec.:FutureWarning",  # Lightning 2.6 on torch 2.13
    "ignore:.*does not have many workers",
    "ignore:.*available but not used",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # Dynamo's own, which it hides otherwise
    "ignore:.*should not be instantiated:DeprecationWarning",  # Dynamo's own
]


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # as on the ranks: the models are tiny and the cores shared
    for line in UPSTREAM:
        config.addinivalue_line("filterwarnings", line)


def pytest_unconfigure() -> None:
    POOL.close()
    ALONE.close()
