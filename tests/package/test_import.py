"""What `import lightning_parallel` loads: its dependencies, and nothing of the extras."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = {"torch", "lightning", "torchmetrics", "numpy", "typing_extensions", "lightning_parallel"}
INSTEAD_OF_LIGHTNING = {"pytorch_lightning", "lightning_fabric"}

# Lightning imports matplotlib and transformers by itself where they are installed, so it comes first.
LOADED = """
import sys
import lightning.pytorch
before = set(sys.modules)
import lightning_parallel
print(*set(sys.modules) - before)
"""
LATER = ("torch.distributed.checkpoint", "torch.distributed.pipelining", "torch.distributed.elastic")
"""Parts of torch that take a tenth of a second to load, which most runs do not need."""


def imported_at_once(file: Path) -> Iterator[str]:
    """The top-level names that a file imports when it is itself imported."""
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif not isinstance(node, ast.FunctionDef) and not for_types_only(node):
            waiting.extend(ast.iter_child_nodes(node))


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_no_file_imports_what_an_extra_installs() -> None:
    allowed = NEEDED | sys.stdlib_module_names | INSTEAD_OF_LIGHTNING
    found = {
        str(file.relative_to(ROOT)): others
        for file in (ROOT / "lightning_parallel").rglob("*.py")
        if (others := set(imported_at_once(file)) - allowed)
    }
    assert not found


def test_importing_it_loads_nothing_else() -> None:
    command = [sys.executable, "-c", LOADED]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=240)
    loaded = ended.stdout.split()
    assert {name.partition(".")[0] for name in loaded} - NEEDED <= sys.stdlib_module_names
    assert not [name for name in loaded if name.startswith(LATER)]


def test_every_strategy_has_a_name() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    import lightning_parallel

    strategies = {name for name in lightning_parallel.__all__ if name.endswith("Strategy")} - {"HybridStrategy"}
    own = [name for name in StrategyRegistry.available_strategies() if name.startswith("lp_")]
    assert {type(StrategyRegistry.get(name)).__name__ for name in own} == strategies
    assert "lp_expert_parallel" in own
