"""The four floors: a file imports only floors below its own, techniques never each other, Lightning only the top."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_parallel"
FLOORS = dict.fromkeys(("arguments", "mesh", "plan", "values", "checkpoint"), 0)
FLOORS |= {"collectives": 1, "techniques": 2, "strategies": 3}
COMMANDS = {"schedule": 2}  # run with `python -m`: may import up to that floor, and no file imports them
SHARED_BY_TECHNIQUES = {"technique", "division", "step", "tools", "observed", "gradients", "divided"}
MAX_FILES = 14
MAX_LINES = 600
FORBIDDEN = {
    r"\bhasattr\(": "ask for a map, not for an attribute",
    r"isinstance\([^)]*[sS]trategy": "ask what, not who",
}

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
TOP = {ROOT / PACKAGE / "__init__.py", ROOT / PACKAGE / "__main__.py"}  # what users import, what they run


def shown(file: Path) -> str:
    return str(file.relative_to(ROOT))


def dotted(file: Path) -> tuple[str, ...]:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(file: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and dotted name of everything imported, `from a import b` as both a and a.b."""
    package = dotted(file) if file.name == "__init__.py" else dotted(file)[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(alias.name.split("."))) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            origin = base + tuple((node.module or "").split(".") if node.module else ())
            yield from ((node.lineno, (*origin, alias.name)) for alias in node.names)


def faults(file: Path) -> Iterator[str]:
    own = dotted(file)
    if file not in TOP and own[1] not in FLOORS | COMMANDS:
        yield f"{shown(file)} is on no floor"
        return
    for line, name in imports(file):
        place = f"{shown(file)}:{line}"
        if name[0] in ("lightning", "pytorch_lightning", "lightning_fabric") and file.name != "lightning_package.py":
            yield f"{place} imports {name[0]}, which only strategies/lightning_package.py may"
        if name[0] != PACKAGE or file in TOP:
            continue
        if len(name) < 2 or name[1] not in FLOORS:
            yield f"{place} imports {'.'.join(name)}, which is on no floor"
        elif FLOORS[name[1]] > (FLOORS | COMMANDS)[own[1]]:
            yield f"{place} imports {'.'.join(name)} from a floor above"
        elif own[1] == name[1] == "techniques" and not may_share(own[2:3], name[2:3]):
            yield f"{place} imports {'.'.join(name)}, another technique"


def may_share(own: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """A technique is a file or a folder of its own; what several use, the rooms of `SHARED_BY_TECHNIQUES` hold."""
    return not own or not other or other[0] in SHARED_BY_TECHNIQUES or own[0] == other[0]


def test_imports_respect_the_floors() -> None:
    assert not [fault for file in FILES for fault in faults(file)]


def test_folders_of_strategies_import_each_other_one_way() -> None:
    imported: dict[str, set[str]] = defaultdict(set)
    for file in (each for each in FILES if dotted(each)[1:2] == ("strategies",)):
        own = dotted(file)[2:3]
        for _, name in imports(file):
            if own and name[:2] == (PACKAGE, "strategies") and name[2:3] not in ((), own):
                imported[own[0]].add(name[2])
    assert list(TopologicalSorter(imported).static_order())  # raises CycleError, which names the folders


def test_files_and_folders_are_small() -> None:
    every = [file for folder in (PACKAGE, "recipes", "tests") for file in (ROOT / folder).rglob("*.py")]
    lengths = {shown(file): len(file.read_text().splitlines()) for file in every}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    held = {each.parent: [file for file in each.parent.glob("*.py") if file.name != "__init__.py"] for each in FILES}
    assert not {shown(folder): len(files) for folder, files in held.items() if len(files) > MAX_FILES}


def test_code_never_asks_who() -> None:
    texts = {shown(file): file.read_text() for file in FILES}
    rules = FORBIDDEN.items()
    assert not [f"{name}: {say}" for name, text in texts.items() for rule, say in rules if re.search(rule, text)]


def test_private_fields_are_known_in_one_place() -> None:
    """Those of loops and loaders."""
    private = r"\._(combined_loader|mode|iterator|spec|predictions|data_fetcher|accelerator_connector)\b"
    strategies = (file for file in FILES if "strategies" in file.parts and file.name != "lightning_internals.py")
    own = r"(gradient|shard|part)\._spec"  # a DTensor's
    found = [file.name for file in strategies if re.search(private, re.sub(own, "", file.read_text()))]
    assert not found, "read them through strategies/lightning_internals.py"


MUTABLE = {"dict", "list", "set", "defaultdict", "deque", "count", "Counter"}
MUTABLE |= {"WeakKeyDictionary", "WeakValueDictionary"}


def changing_names(file: Path) -> Iterator[int]:
    """Lines of names of a module that hold what can change, unless they are written as constants."""
    for node in ast.parse(file.read_text()).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        called = node.value.func if isinstance(node.value, ast.Call) else None
        changes = isinstance(node.value, (ast.Dict, ast.List, ast.Set)) or ast.unparse(called or target) in MUTABLE
        if changes and isinstance(target, ast.Name) and not target.id.strip("_").isupper() and target.id != "__all__":
            yield node.lineno


def test_modules_say_why_they_hold_what_changes() -> None:
    found = []
    for file in (file for file in FILES if file not in TOP):
        lines = file.read_text().splitlines()
        found += [f"{shown(file)}:{n}" for n in changing_names(file) if "#" not in lines[n - 2] + lines[n - 1]]
        found += [f"{shown(file)}: global" for line in lines if re.match(r"\s+global ", line)]
    assert not found
