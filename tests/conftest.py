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


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three files at a time, as ranks often wait for each other; one by one what is timed, printed or in one file."""
    alone = config.option.capture == "no" or config.option.markexpr in ("benchmark", "gpu")
    files = {argument.partition("::")[0] for argument in config.args}
    return 0 if alone or (len(files) == 1 and files.pop().endswith(".py")) else 3


def pytest_unconfigure() -> None:
    POOL.close()
    ALONE.close()
