"""The document that results become."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from statistics import median
from textwrap import fill

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
ALIKE = 150  # characters by which reasons are compared, without their numbers

TEXT = """# Compatibility

{architectures} architectures of transformers and {written} modules written by hand, each trained on two ranks and in
one process. This page is made by a command:

```bash
python -m tests.compatibility run          # goes on where it stopped; --again repeats what was not exact
python -m tests.compatibility table > docs/compatibility.md
```

The newest result of each model and technique, of the commits {commits}, with
torch {torch}, lightning {lightning} and transformers {transformers}, on CPU ranks (gloo).

**How.** The config class of an architecture is filled with small numbers (width {width}, {layers} layers, a vocabulary
of {tokens}, no dropout), and the model is built with the head of its task and random weights. A module written by hand
is used in the three blocks of a language model of that size (`tests/compatibility/handwritten`). Each model trains
three steps of eight samples by SGD with momentum in double precision. Losses of all steps, as logged, and all weights
at the end are compared on both ranks with one process that reads the whole batch: losses to {tolerance:g} relative,
weights to {weights:g} of the largest element of their tensor. Where transformers computes a loss or a norm in single
precision, it is made to stay in double. Small models say nothing about speed, nor about what only large ones have.

| Word | Meaning |
|---|---|
| exact | equal to one process |
| as halves | equal to one process that accumulates two halves of each batch |
| refused | both ranks raise an error of this package with the rule and the remedy; [the reasons](#refused) |
| wrong, error, hang | other losses or weights; an exception that explains less; a rank that does not return |

Models are exact as halves where [samples interact](#as-halves) (BatchNorm, contrastive losses, experts with a capacity,
means over something of which samples have unequal amounts): each rank or microbatch has its own samples only.

{summary}

"Held" is the share of the parameters' elements on the rank that holds more of them: the median over the models, and the
range.
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
    rows = [
        [f"{name}: {NAMES[name]}", *(str(counts[name, kind]) for kind in KINDS), held(tried, name)] for name in columns
    ]
    return table(["On two ranks", *KINDS, "held"], rows).rstrip()


def held(tried: Sequence[Result], technique: str) -> str:
    trained = [result for result in tried if result.result in ("exact", "as halves")]
    shares = [result.share for result in trained if result.technique == technique] or [1.0]
    return f"{median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"


def families(tried: Sequence[Result], columns: Sequence[str]) -> list[str]:
    """A section for each family, with a line for each set of models of which all results are alike."""
    results = {(result.architecture, result.technique): result.result for result in tried}
    sections = []
    for family in dict.fromkeys(result.family for result in tried):
        alike: dict[str, list[str]] = {}
        for name in dict.fromkeys(result.architecture for result in tried if result.family == family):
            known = {column: results[name, column] for column in columns if (name, column) in results}
            alike.setdefault(described(known), []).append(f"`{name}`")
        lines = [bullet(f"{', '.join(names)}: {text}") for text, names in alike.items()]
        sections.append(f"## {family.capitalize()}\n\n" + "\n".join(lines) + "\n")
    return sections


def described(results: dict[str, str]) -> str:
    """Such as "exact under dp2 and zero3, refused under pp2"."""
    kinds = {kind: [name for name, result in results.items() if result == kind] for kind in KINDS}
    return "; ".join(f"{kind} under {', '.join(names)}" for kind, names in kinds.items() if names)


def bullet(text: str) -> str:
    return fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def reasons(kind: str, title: str, tried: Sequence[Result]) -> str:
    """Each reason once, with the models that gave it; reasons that differ in numbers only are one."""
    models: dict[str, dict[str, list[str]]] = {}
    examples: dict[str, str] = {}
    for result in tried:
        if result.result == kind:
            text = shortened(result.detail)
            reason = re.sub(r"\d[\d.e-]*", "0", text)[:ALIKE]
            examples.setdefault(reason, text)
            models.setdefault(reason, {}).setdefault(result.architecture, []).append(result.technique)
    lines = []
    for reason, techniques in models.items():
        names = ", ".join(f"`{name}` ({', '.join(each)})" for name, each in techniques.items())
        lines.append(bullet(f"{names}: {examples[reason]}"))
    return f"## {title}\n\n" + "\n".join(lines) + "\n" if lines else ""


def not_tried(untried: dict[str, str]) -> str:
    """The models by the kind of the exception that one process raised."""
    kinds: dict[str, list[str]] = {}
    for name, reason in sorted(untried.items()):
        kinds.setdefault(reason.partition(":")[0], []).append(f"`{name}`")
    lines = [bullet(f"{kind}: {', '.join(names)}") for kind, names in sorted(kinds.items())]
    title = "## Not tried\n\nOne process could not train these with such small numbers, or not twice alike.\n\n"
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
