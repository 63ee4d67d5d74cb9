"""The command: `python -m tests.compatibility run`, then `python -m tests.compatibility table > docs/compatibility.md`.

`run` goes on where it stopped; `--again` repeats what was not exact.
"""

import argparse
import random
import re
import warnings
from pathlib import Path

from tests.compatibility import sweep, table
from tests.compatibility.architectures import Architecture, architectures
from tests.compatibility.handwritten import written
from tests.compatibility.trial import TECHNIQUES
from tests.ranks import POOL

RESULTS = Path("outputs/compatibility.jsonl")


def main() -> None:
    chosen = arguments()
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    tried = architectures() | written()
    if chosen.command == "table":
        known = sweep.read(chosen.results).values()
        print(table.document(result for result in known if result.architecture in tried), end="")
    else:
        run(chosen, [each for each in tried.values() if re.fullmatch(chosen.only, each.name)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=__doc__)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file of JSON lines")
    parser.add_argument("--techniques", default=",".join(TECHNIQUES), help="separated by commas")
    parser.add_argument("--sample", type=int, help="so many architectures, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=".*", help="a pattern of names")
    parser.add_argument("--again", action="store_true", help="try again what was neither exact nor not tried")
    parser.add_argument("--all-again", action="store_true", help="try everything again")
    return parser.parse_args()


def run(chosen: argparse.Namespace, wanted: list[Architecture]) -> None:
    warnings.simplefilter("ignore")
    if chosen.sample is not None:
        wanted = random.Random(chosen.seed).sample(wanted, min(chosen.sample, len(wanted)))
    known = sweep.read(chosen.results)
    final = {"exact", sweep.NOT_TRIED} if chosen.again else {result.result for result in known.values()}
    done = set() if chosen.all_again else {pair for pair, result in known.items() if result.result in final}
    for result in sweep.sweep(wanted, chosen.techniques.split(","), done):
        sweep.append(chosen.results, result)
        pair = f"{result.architecture:24} {result.technique:10}"
        print(f"{pair} {result.result:10} {result.seconds:5} s  {result.detail[:160]}", flush=True)
    POOL.close()


if __name__ == "__main__":
    main()
