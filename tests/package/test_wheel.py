"""The wheel: what is in it, and that it works where there is no checkout."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

import lightning_parallel
from tests.recipes.test_train import TINY, write_texts

ROOT = Path(__file__).parents[2]
USER = """
from lightning_parallel import HybridStrategy, Zero

reveal_type(Zero(2).stage)
HybridStrategy(Zero(stage="three"))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, for setuptools leaves files beside what it builds."""
    folder = tmp_path_factory.mktemp("built")
    for name in (".ci", "lightning_parallel", "recipes", "conf"):
        copytree(ROOT / name, folder / "copy" / name, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        copy(ROOT / name, folder / "copy")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "copy", check=True, capture_output=True, timeout=240)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as site-packages would be."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def files(folder: Path, pattern: str) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob(pattern)}


def test_it_holds_library_recipes_and_configurations(installed: Path) -> None:
    assert {folder.name for folder in installed.iterdir() if "dist-info" not in folder.name} == {"lightning_parallel"}
    library, bundled = installed / "lightning_parallel", installed / "lightning_parallel" / "bundled"
    held = {name for name in files(library, "*.py") if not name.startswith("bundled")}
    assert held == files(ROOT / "lightning_parallel", "*.py")
    assert files(bundled / "recipes", "*.py") == files(ROOT / "recipes", "*.py")
    assert files(bundled / "conf", "*.yaml") == files(ROOT / "conf", "*.yaml")
    assert (library / "py.typed").exists()


def test_its_metadata_tell_version_licence_and_command(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    told = (info / "METADATA").read_text()
    assert f"\nVersion: {lightning_parallel.__version__}\n" in told
    assert "\nLicense-Expression: Apache-2.0\n" in told
    assert (info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "lightning-parallel = lightning_parallel.__main__:main" in (info / "entry_points.txt").read_text()
    assert f"## [{lightning_parallel.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.launched
def test_its_command_trains_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    layout = ["data=text", "data.path=texts", "data.cache_dir=cache", "trainer.devices=2", "strategy=pipeline_parallel"]
    ended = subprocess.run(
        [sys.executable, "-m", "lightning_parallel", "train", *TINY, *layout],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    assert "validation loss" in ended.stdout
    assert (tmp_path / "out" / "checkpoints" / "last.ckpt").exists()


@pytest.mark.exhaustive
def test_users_mypy_finds_our_types(installed: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=240)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    copytree(installed, site, dirs_exist_ok=True)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--python-executable", tmp_path / "venv" / "bin" / "python", "user.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    revealed, wrong, _ = ended.stdout.splitlines()
    assert "Literal[1" in revealed, ended.stdout + ended.stderr
    assert 'Argument "stage" to "Zero" has incompatible type' in wrong
