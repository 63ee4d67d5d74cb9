"""The document that results become."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from tests.compatibility.sweep import NOT_TRIED, TOLERANCE, Result
from tests.compatibility.trial import TECHNIQUES

NAMES = {
    "dp2": "`DataParallelStrategy()`",
    "dp2 padded": "the same, padded targets",
    "zero3": "`ZeroStrategy()`",
    "pp2": "`PipelineParallelStrategy()`",
    "tp2": "`TensorParallelStrategy()`",
    "tp2 whole": "`TensorParallelStrategy(sequence_parallel=False)`",
    "cp2": "`ContextParallelStrategy()`",
    "ep2": "`ExpertParallelStrategy()`",
}
BY_HAND = "by hand"  # ends the families of what is no architecture of transformers
KINDS = ("exact", "as halves", "refused", "wrong", "error", "hang")
LONGEST = 300

TEXT = """# Compatibility

{architectures} architectures of transformers and {written} modules written by hand, each trained on two ranks and in
one process. This page is made by a command:

```bash
python -m tests.compatibility run          # goes on where it stopped; --again repeats what was not exact
python -m tests.compatibility table > docs/compatibility.md
```

Made from the commits {commits}, the newest result of each pair,
with torch {torch}, lightning {lightning} and transformers {transformers}, on CPU ranks (gloo).

**How.** The config class of an architecture is filled with small numbers (a width of {width}, {layers} layers, {tokens}
tokens, no dropout), the model is built with the head of its task and with random weights; modules written by hand stand
in the three blocks of a language model of that size (`tests/compatibility/handwritten`). Each trains three steps of
eight samples by SGD with momentum, in double precision. Losses of all steps, as logged, and all weights at the end, on
both ranks, are compared with one process that reads the whole batch: losses to {tolerance:g} relative, weights to
{weights:g} of the largest element of their tensor. Small models say nothing about speed, nor about what only large ones
have. Where transformers computes a loss or a norm in single precision, it is made to stay in double.

As halves are those in which samples of a batch meet, by BatchNorm, in a contrastive loss, where an expert takes so many
tokens of a batch and leaves out the rest (`nllb-moe` with room for all of them is exact), or in a mean over something
that samples have more or less of: two ranks, or two microbatches, each see their own samples only. Halves of padded
batches count by their targets.

| Word | Meaning |
|---|---|
| exact | as one process |
| 50% | of the elements of the parameters, that rank which held more of them held so many |
| as halves | as one process that reads each batch in two halves and accumulates: [samples meet](#as-halves) |
| refused | an error of this project on both ranks that says why and what to do; [the reasons](#refused) |
| error | an exception that says less; if there are any, a section tells what it said |
| wrong | other losses or weights; if there are any, a section tells where |
| hang | a rank was waited for in vain |

{summary}
"""


def document(results: Iterable[Result]) -> str:
    """The page; `results` are the newest of each pair."""
    found = sorted(results, key=lambda result: (result.family, result.architecture))
    found = [result for result in found if WITHOUT_EXPERTS not in result.detail]
    untried = {result.architecture: result.detail for result in found if result.result == NOT_TRIED}
    tried = [result for result in found if result.architecture not in untried]
    columns = [name for name in TECHNIQUES if any(result.technique == name for result in tried)]
    parts = [head(tried, columns), *families(tried, columns)]
    parts += [reasons(kind, title, tried) for kind, title in SECTIONS.items()]
    parts += [not_tried(untried)]
    return "\n".join(part for part in parts if part)


WITHOUT_EXPERTS = "finds no experts"
"""How a refusal of expert parallelism goes on that says nothing of an architecture: such cells stay empty."""
SECTIONS = {"as halves": "As halves", "refused": "Refused", "error": "Errors", "wrong": "Wrong", "hang": "Hangs"}


def head(tried: Sequence[Result], columns: Sequence[str]) -> str:
    from tests.compatibility.tiny import LAYERS, VOCABULARY, WIDTH

    return TEXT.format(
        architectures=len({result.architecture for result in tried if not result.family.endswith(BY_HAND)}),
        written=len({result.architecture for result in tried if result.family.endswith(BY_HAND)}),
        commits=", ".join(f"`{commit}`" for commit in dict.fromkeys(result.commit for result in tried)),
        torch=version("torch"),
        lightning=version("lightning"),
        transformers=version("transformers"),
        width=WIDTH,
        layers=LAYERS,
        tokens=VOCABULARY,
        tolerance=TOLERANCE,
        weights=10 * TOLERANCE,
        summary=summary(tried, columns),
    )


def summary(tried: Sequence[Result], columns: Sequence[str]) -> str:
    counts = Counter((result.technique, result.result) for result in tried)
    rows = [[f"{name}: {NAMES[name]}", *(str(counts[name, kind]) for kind in KINDS)] for name in columns]
    return table(["On two ranks", *KINDS], rows)


def families(tried: Sequence[Result], columns: Sequence[str]) -> list[str]:
    cells = {(result.architecture, result.technique): cell(result) for result in tried}
    found = []
    for family in dict.fromkeys(result.family for result in tried):
        names = dict.fromkeys(result.architecture for result in tried if result.family == family)
        rows = [[f"`{name}`", *(cells.get((name, column), "") for column in columns)] for name in names]
        found.append(f"## {family.capitalize()}\n\n{table(['Architecture', *columns], rows)}")
    return found


def cell(result: Result) -> str:
    if result.result not in ("exact", "as halves") or result.share > 0.999:
        return result.result
    return f"{result.result}, {result.share:.0%}"


def reasons(kind: str, title: str, tried: Sequence[Result]) -> str:
    """Each reason once, with those that gave it."""
    told: dict[str, list[str]] = {}
    for result in tried:
        if result.result == kind:
            told.setdefault(f"{shortened(result.detail)}", []).append(f"`{result.architecture}` ({result.technique})")
    lines = [f"- {', '.join(names)}: {text}" for text, names in told.items()]
    return f"## {title}\n\n" + "\n".join(lines) + "\n" if lines else ""


def not_tried(untried: dict[str, str]) -> str:
    lines = [f"- `{name}`: {shortened(reason)}" for name, reason in sorted(untried.items())]
    title = "## Not tried\n\nOne process could not train these as they were made here, or not twice alike.\n\n"
    return title + "\n".join(lines) + "\n" if lines else ""


def shortened(text: str) -> str:
    plain = (
        re.sub(r"/\S*site-packages/", "", " ".join(text.split()))
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("*", "\\*")
    )
    return plain if len(plain) <= LONGEST else plain[:LONGEST] + "…"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
