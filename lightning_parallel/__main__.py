"""The command `lightning-parallel`, also `python -m lightning_parallel`: trains, exports, prints pipeline schedules."""

import argparse
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning_parallel import __version__, schedule

EXTRA = ("hydra", "tokenizers", "matplotlib")
"""Packages that the recipe imports and that only the extra `recipes` installs."""

EXAMPLES = """\
train takes Hydra's overrides, schedule has its own options; --help lists them:
  lightning-parallel train                                       ZeRO 3 on all GPUs, or on two CPU processes
  lightning-parallel train strategy=zero techniques.zero.stage=2 trainer.devices=4
  lightning-parallel train experiment=gpt-124m --cfg job         shows the configuration without training
  lightning-parallel export checkpoints/last.ckpt my-gpt         makes a Hugging Face folder of a checkpoint
  lightning-parallel schedule zbv --ranks 4 --microbatches 8
"""


def recipes() -> Path:
    """Return the folder of `train.py`: inside the package of a wheel, beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    bundled = package / "bundled" / "recipes"
    return bundled if bundled.is_dir() else package.parent / "recipes"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    command = argparse.ArgumentParser(
        prog="lightning-parallel",
        description="Trains a GPT on any layout of ranks; shows a schedule of pipeline parallel.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--version", action="version", version=__version__)
    command.add_argument("command", choices=("train", "export", "schedule"))
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="what the command takes")
    line = command.parse_args(arguments)
    if line.command == "schedule":
        schedule.main(line.arguments)
        return
    missing = [module for module in EXTRA if find_spec(module) is None]
    if missing:
        command.error(f"training needs {', '.join(missing)}: pip install 'lightning-parallel[recipes]'")
    if line.command == "export":
        sys.path.insert(0, str(recipes().parent))
        sys.argv = ["export", *line.arguments]
        runpy.run_module("recipes.hub", run_name="__main__", alter_sys=True)
        return
    # Run as a script under its path: the processes that Lightning launches are started with the same path.
    script = str(recipes() / "train.py")
    sys.argv = [script, *line.arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
