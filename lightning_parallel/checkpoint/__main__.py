"""Inspect and convert checkpoints: ``python -m lightning_parallel.checkpoint COMMAND PATH``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_parallel.checkpoint import commit, folder, sealed
from lightning_parallel.checkpoint.files import Damaged, reading, shortened
from lightning_parallel.checkpoint.hub import CONFIG, LARGEST, weights_of, write


def inspect(line: argparse.Namespace) -> None:
    """Print what a sharded checkpoint holds; of its files only the manifest is read."""
    manifest = folder.read_manifest(line.path)  # the only file that is read
    axes = " x ".join(f"{axis} {size}" for axis, size in manifest.layout.items() if size > 1) or "one process"
    print(f"{line.path}: step {manifest.step}, written by {axes}, {len(manifest.files)} files")
    print(f"written with {', '.join(f'{library} {version}' for library, version in manifest.versions.items())}")
    held: Counter[str] = Counter()
    for name, table in manifest.tensors.items():
        held[name.split("/")[0]] += table.nbytes
    for part in manifest.holds:
        print(f"  {part:<30} {held[part]:>18,} bytes of tensors" if part in held else f"  {part}")


def verify(line: argparse.Namespace) -> None:
    """Read all of a checkpoint, and report whether it was changed after it was written."""
    folder.verify(line.path)
    if not line.path.is_dir():
        try:  # what torch cannot read is no checkpoint
            sealed.load(line.path)
        except ValueError as error:  # an archive whose values only code could restore is a checkpoint
            if isinstance(error, Damaged) or not zipfile.is_zipfile(line.path):
                raise
    print(f"{line.path} is as it was written")


def consolidate(line: argparse.Namespace) -> None:
    """Write a sharded checkpoint as one plain file, which any program can read; all of it is in memory meanwhile."""
    manifest = folder.read_manifest(line.path)
    folder.verify(line.path)
    _write(line.output, folder.read(line.path, manifest, lambda name: False))


def import_(line: argparse.Namespace) -> None:
    """Write a folder of torch.distributed.checkpoint as one plain file; only for folders you trust: it may run code."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # imported only for such a folder

    if not folder.is_torch_folder(line.path):
        raise Damaged(f"{line.path} is not a torch.distributed.checkpoint folder: it has no {folder.TORCH_INDEX}")
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(line.path, f"{scratch}/all.pt")
        content: dict[str, Any] = sealed.load(f"{scratch}/all.pt")
    rest = line.path / "meta.pt"  # where Lightning writes everything but the model and the optimizers
    checkpoint: dict[str, Any] = sealed.load(rest) if rest.exists() else {}
    checkpoint["state_dict"] = content.get("state_dict", content.get("model"))
    if not isinstance(checkpoint["state_dict"], dict):
        raise Damaged(f"{line.path} holds {', '.join(map(str, content))}, but no model that Lightning saved")
    if numbers := sorted(int(name[10:]) for name in content if name.startswith("optimizer_")):
        checkpoint["optimizer_states"] = [content[f"optimizer_{number}"] for number in numbers]
    _write(line.output, checkpoint)


def convert(line: argparse.Namespace) -> None:
    """Write a Hugging Face folder from a full or sharded checkpoint whose module wraps a Hugging Face model."""
    config = line.config / CONFIG if line.config.is_dir() else line.config
    with reading(line.path):
        weights = weights_of(folder.content_of(line.path), line.prefix)
    write(line.output, weights, json.loads(config.read_text()), line.largest)
    print(f"{line.output} written: {shortened(sorted(weights))}")


def _write(output: Path, content: Any) -> None:
    if output.exists():
        raise Damaged(f"{output} already exists; choose another name")
    with commit.writing(output) as temporary:
        sealed.save(content, temporary)
        commit.commit(temporary, output)
    print(f"{output} written")


COMMANDS = {"inspect": inspect, "verify": verify, "convert": convert, "consolidate": consolidate, "import": import_}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a damaged checkpoint ends it with a message and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m lightning_parallel.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run in COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        command.add_argument("path", type=Path, help="a checkpoint")
        if name in ("consolidate", "import"):
            command.add_argument("output", type=Path, help="the file to write")
        if name == "convert":
            command.add_argument("output", type=Path, help="the folder to write")
            command.add_argument("--config", type=Path, required=True, help="the model's config.json, or its folder")
            command.add_argument("--prefix", help="prefix of the weights in the module; default: the common one")
            command.add_argument("--largest", type=int, default=LARGEST, help="bytes of tensors in a file")
    line = parser.parse_args(arguments)
    try:
        COMMANDS[line.command](line)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
