"""Tries architectures under techniques, one after the other on the warm pool, and writes a line for each try.

A rank that hangs or dies is ended and started anew by the pool; the sweep goes on.
"""

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.compatibility.architectures import OF_TEXT, Architecture
from tests.compatibility.trial import TECHNIQUES, Failure, Technique, Trained, train
from tests.curves import Curve, compare
from tests.ranks import POOL, RanksFailed, run_on_ranks

TOLERANCE = 1e-9  # of losses; of a weight ten times as much, relative to the largest element of its tensor
TIMEOUT, LIMIT = 60.0, 120.0  # seconds, of one collective and of one try
RENEW = 100  # architectures after which the ranks start anew: every model's code stays in memory
NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Result:
    """How one architecture fared under one technique."""

    architecture: str
    family: str
    technique: str
    result: str
    detail: str = ""
    share: float = 1.0
    seconds: float = 0.0
    commit: str = ""


class Untried(Exception):  # noqa: N818
    """One process cannot train the architecture, so that there is nothing to compare with."""


class References:
    """The runs of one process that an architecture is compared with; each is made when it is first asked for."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self.known: dict[tuple[bool, int], Trained | Untried] = {}

    def get(self, padded: bool, accumulate: int = 1) -> Trained:
        """The run; raises `Untried` if it fails or cannot be repeated."""
        if (padded, accumulate) not in self.known:
            try:
                self.known[padded, accumulate] = self.make(padded, accumulate)
            except Untried as reason:
                self.known[padded, accumulate] = reason
        found = self.known[padded, accumulate]
        if isinstance(found, Untried):
            raise found
        return found

    def make(self, padded: bool, accumulate: int) -> Trained:
        first = self.run(padded, accumulate)
        if not all(math.isfinite(loss) for loss in first.curve.losses):
            raise Untried("its loss is not finite")
        if accumulate == 1 and not padded and difference(first.curve, self.run(padded, accumulate).curve, 0.0):
            raise Untried("two runs of one process differ")
        return first

    def run(self, padded: bool, accumulate: int) -> Trained:
        call = train, self.architecture, None, padded, accumulate
        try:
            (trained,) = run_on_ranks(1, *call, timeout=TIMEOUT, limit=LIMIT)
        except RanksFailed as error:
            raise Untried(last_line(str(error))) from None
        if isinstance(trained, Failure):
            raise Untried(f"{trained.kind}: {trained.message}")
        return trained


def sweep(
    architectures: Sequence[Architecture], techniques: Sequence[str], known: set[tuple[str, str]]
) -> Iterator[Result]:
    """Yields a result for each pair that is not known."""
    for number, architecture in enumerate(architectures):
        left = [name for name in techniques if (architecture.name, name) not in known and fits(architecture, name)]
        if left and number % RENEW == RENEW - 1:
            POOL.kill()
        references = References(architecture)
        for name in left:
            yield try_one(references, name)


def fits(architecture: Architecture, technique: str) -> bool:
    """Padded targets are a thing of texts."""
    return architecture.family in OF_TEXT or not TECHNIQUES[technique].padded


def try_one(references: References, name: str) -> Result:
    start, architecture = time.monotonic(), references.architecture
    result, detail, share = outcome(references, TECHNIQUES[name], name)
    seconds = round(time.monotonic() - start, 1)
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return Result(architecture.name, architecture.family, name, result, detail, round(share, 3), seconds, commit)


def outcome(references: References, technique: Technique, name: str) -> tuple[str, str, float]:
    """What is said of a try, with the reason, and the largest share of the parameters that a rank kept."""
    try:
        reference = references.get(technique.padded)
        ranks = run_on_ranks(2, train, references.architecture, name, technique.padded, timeout=TIMEOUT, limit=LIMIT)
    except Untried as reason:
        return NOT_TRIED, str(reason), 1.0
    except RanksFailed as error:  # a rank did not come back: it still runs, or it died
        return ("hang" if "still running" in str(error) else "error"), last_line(str(error)), 1.0
    failures = [rank for rank in ranks if isinstance(rank, Failure)]
    return failed(failures, len(ranks)) if failures else judged(references, technique, reference, ranks)


def failed(failures: Sequence[Failure], ranks: int) -> tuple[str, str, float]:
    """Refused only where every rank says why; a rank that waited until the timeout is a hang."""
    first = min(failures, key=lambda failure: (failure.consequence, failure.ours))
    if "imed out" in first.message or "timeout" in first.message:
        return "hang", first.message, 1.0
    refused = len(failures) == ranks and all(failure.ours for failure in failures)
    text = first.message if refused else f"{first.kind}: {first.message} [{first.place}]"
    return ("refused" if refused else "error"), text, 1.0


def judged(
    references: References, technique: Technique, reference: Trained, ranks: Sequence[Trained]
) -> tuple[str, str, float]:
    share = max(rank.share for rank in ranks)
    found = first_difference(reference.curve, ranks)
    if not found:
        return "exact", "", share
    try:
        halves = in_halves(references.get(technique.padded, accumulate=2))
    except Untried as reason:
        return "wrong", f"{found}; and in halves: {reason}", share
    names = set(halves.parameters)
    if not first_difference(only(halves.curve, names), ranks, lambda curve: only(curve, names)):
        return "as halves", found, share
    return "wrong", found, share


def in_halves(trained: Trained) -> Trained:
    """The run of half batches, accumulated, with the mean of the losses of two halves as that of a batch."""
    losses = trained.curve.losses
    means = [(one + other) / 2 for one, other in zip(losses[::2], losses[1::2], strict=True)]
    return Trained(Curve(means, [], trained.curve.weights), trained.parameters)


def only(curve: Curve, names: set[str]) -> Curve:
    """Losses and parameters; buffers, such as BatchNorm's averages, see half batches differently."""
    return Curve(curve.losses, [], {name: value for name, value in curve.weights.items() if name in names})


def first_difference(
    reference: Curve, ranks: Sequence[Trained], part: Callable[[Curve], Curve] = lambda curve: curve
) -> str:
    found = (difference(reference, part(trained.curve), TOLERANCE) for trained in ranks)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(found) if text), "")


def difference(reference: Curve, got: Curve, rtol: float) -> str:
    try:
        compare(reference, got, rtol)
    except AssertionError as error:
        return str(error)
    return ""


def last_line(report: str) -> str:
    return report.strip().splitlines()[-1] if report.strip() else "nothing was said"


def read(path: Path) -> dict[tuple[str, str], Result]:
    """The newest result of each pair."""
    if not path.exists():
        return {}
    results = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    return {(result.architecture, result.technique): result for result in results}


def append(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
