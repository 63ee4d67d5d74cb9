"""Inspect and convert checkpoints: ``python -m lightning_parallel.checkpoint COMMAND PATH``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch

from lightning_parallel.checkpoint import commit, folder
from lightning_parallel.checkpoint.damage import Damaged, reading, shortened
from lightning_parallel.checkpoint.hub.folder import CONFIG, LARGEST, write
from lightning_parallel.checkpoint.hub.weights import content_of, weights_of
from lightning_parallel.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from lightning_parallel.checkpoint.sealed import SealedFile, require_readable, require_unchanged
from lightning_parallel.checkpoint.torch_folder import INDEX, converted, is_torch_folder


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    line = argparse.ArgumentParser(prog="python -m lightning_parallel.checkpoint", description=__doc__)
    commands = line.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (about, _) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("path", type=Path, help="a checkpoint")
        if name in ("consolidate", "import"):
            command.add_argument("output", type=Path, help="the file to write")
        if name == "convert":
            command.add_argument("output", type=Path, help="the folder to write")
            command.add_argument("--config", type=Path, required=True, help="the model's config.json, or its folder")
            command.add_argument("--prefix", help="what names begin with in the module; by default what all share")
            command.add_argument("--largest", type=int, default=LARGEST, help="bytes of tensors in a file")
    return line


def inspect(line: argparse.Namespace) -> None:
    """Print what a sharded checkpoint holds; its files are not read."""
    manifest = _manifest_of(line.path)
    axes = " x ".join(f"{axis} {size}" for axis, size in manifest.layout.items() if size > 1) or "one process"
    print(f"{line.path}: step {manifest.step}, written by {axes}, {len(manifest.files)} files")
    print(f"written with {', '.join(f'{library} {version}' for library, version in manifest.versions.items())}")
    held: Counter[str] = Counter()
    for name, table in manifest.tensors.items():
        held[name.split("/")[0]] += table.nbytes
    for part in manifest.holds:
        print(f"  {part:<30} {held[part]:>18,} bytes of tensors" if part in held else f"  {part}")


def verify(line: argparse.Namespace) -> None:
    """Read all of a checkpoint, and say whether it is as it was written."""
    if line.path.is_dir():
        folder.require_whole(line.path, folder.faults(line.path, _manifest_of(line.path)))
    else:
        require_unchanged(line.path)
        require_readable(line.path)
    print(f"{line.path} is as it was written")


def consolidate(line: argparse.Namespace) -> None:
    """Make one plain file of a sharded checkpoint, which everybody can read; it is whole in memory meanwhile."""
    manifest = _manifest_of(line.path)
    folder.require_whole(line.path, folder.faults(line.path, manifest))
    _write(line.output, folder.read(line.path, manifest, lambda name: False))


def import_(line: argparse.Namespace) -> None:
    """Make one plain file of a folder of torch.distributed.checkpoint; this may run code of the folder."""
    if not is_torch_folder(line.path):
        raise Damaged(f"{line.path} is no folder of torch.distributed.checkpoint: it has no {INDEX}")
    _write(line.output, converted(line.path))


def convert(line: argparse.Namespace) -> None:
    """Make a Hugging Face folder of a checkpoint whose module wraps one of its models; of a full or sharded one."""
    config = line.config / CONFIG if line.config.is_dir() else line.config
    with reading(line.path):
        weights = weights_of(content_of(line.path), line.prefix)
    write(line.output, weights, json.loads(config.read_text()), line.largest)
    print(f"{line.output} written: {shortened(sorted(weights))}")


def _write(output: Path, content: Any) -> None:
    if output.exists():
        raise Damaged(f"{output} is there already; choose another name")
    with commit.writing(output) as made:
        with SealedFile(made) as file:
            torch.save(content, cast(IO[bytes], file))
        commit.commit(made, output)
    print(f"{output} written")


def _manifest_of(path: Path) -> Manifest:
    if not (path / MANIFEST).exists():
        raise Damaged(f"{path} is no sharded checkpoint: it has no {MANIFEST}")
    return read_manifest(path)


COMMANDS: dict[str, tuple[str, Callable[[argparse.Namespace], None]]] = {
    "inspect": ("print what a sharded checkpoint holds", inspect),
    "verify": ("read all of a checkpoint and say whether it is as it was written", verify),
    "convert": ("make a Hugging Face folder of a checkpoint, which from_pretrained loads", convert),
    "consolidate": ("make one plain file of a sharded checkpoint", consolidate),
    "import": (
        "make one plain file of a folder of torch.distributed.checkpoint that you trust: it may run code",
        import_,
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a checkpoint that is damaged ends it with a message and the exit code 1."""
    line = parser().parse_args(arguments)
    try:
        COMMANDS[line.command][1](line)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
