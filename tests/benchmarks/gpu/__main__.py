"""The command: see `python -m tests.benchmarks.gpu --help`."""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.setting import SIZES, Device
from tests.benchmarks.gpu.variants import (
    BASE,
    VARIANTS,
    Measured,
    Setting,
    Variant,
)
from tests.benchmarks.interleaved import markdown, spread

Rounds = list[dict[str, Measured]]


def main(arguments: list[str] | None = None) -> None:
    chosen = parsed(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    setting = Setting(SIZES[chosen.size], Device(chosen.device), chosen.backend)
    start, limit = time.monotonic(), 60 * chosen.minutes
    rates = setting.job.rates(setting.device, seconds=limit / 200)
    training = rounds_of(setting, start + limit, chosen.rounds)
    found = report(setting, rates, training)
    print(document(found))
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    chosen.results.write_text(json.dumps(found, indent=1))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="gpt-1b")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--minutes", type=float, default=7.5, help="but for the first round, which is always whole")
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--results", type=Path, default=Path("outputs/gpu.json"))
    return parser.parse_args(arguments)


def measure(variant: Variant, setting: Setting) -> Measured:
    if setting.device.is_gpu:
        torch.cuda.empty_cache()
    return variant(setting)


def rounds_of(setting: Setting, end: float, most: int) -> Rounds:
    """Each round runs all once, every other one in reverse, as long as one more round ends in time."""
    rounds: Rounds = []
    took = 0.0
    while not rounds or (len(rounds) < most and time.monotonic() + took < end):
        begun = time.monotonic()
        found = {name: measure(VARIANTS[name], setting) for name in list(VARIANTS)[:: -1 if len(rounds) % 2 else 1]}
        rounds.append({name: found[name] for name in VARIANTS})
        took = time.monotonic() - begun
    return rounds


# ---------------------------------------------------------------- what is told


def report(setting: Setting, rates: Mapping[str, float], training: Rounds) -> dict[str, Any]:
    rate = max(rates.values())
    return {
        "device": setting.device.name,
        "torch": torch.__version__,
        "model": setting.job.model,
        "tokens": setting.job.tokens,
        "flops": setting.job.flops,
        "products": rates,
        "training": {name: told_of([found[name] for found in training], setting, rate) for name in training[0]},
        "ratios": {name: [found[name].seconds / found[BASE].seconds for found in training] for name in training[0]},
    }


def told_of(fits: list[Measured], setting: Setting, rate: float) -> dict[str, Any]:
    seconds = statistics.median(fit.seconds for fit in fits)
    return {
        "ms": [1000 * fit.seconds for fit in fits],
        "tokens_per_second": setting.job.tokens / seconds,
        "utilisation": setting.job.flops / seconds / rate,
        "peak": max((fit.peak for fit in fits if fit.peak is not None), default=None),
    }


def document(found: Mapping[str, Any]) -> str:
    products = ", ".join(f"{shape}: {rate / 1e12:.1f}" for shape, rate in found["products"].items())
    rows = [["variant", f"step / {BASE}", "ms a step", "tokens a second", "of the rate", "peak, GiB"]]
    for name, told in found["training"].items():
        peak = "" if told["peak"] is None else f"{told['peak'] / 2**30:.2f}"
        speed = [f"{told['tokens_per_second']:,.0f}", f"{100 * told['utilisation']:.1f} %", peak]
        rows.append([name, spread(found["ratios"][name]), f"{statistics.median(told['ms']):.1f}", *speed])
    head = f"{found['device']}, torch {found['torch']}; {found['model']}, {found['tokens']} tokens a step"
    head += f"; {len(found['ratios'][BASE])} rounds"
    return "\n\n".join([head, f"products, TFLOP/s: {products}", markdown(rows)])


if __name__ == "__main__":
    main()
