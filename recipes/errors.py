"""Mistakes in the configuration or the data, told in one paragraph instead of a traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue

from recipes import checks
from recipes.corpus import CorpusError


@contextmanager
def explained() -> Iterator[None]:
    """Leave the program with an explanation where the mistake is the user's; any other error keeps its traceback."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints and exits by itself, without the choices
    try:
        yield
    except (HydraException, MissingMandatoryValue, checks.ConfigurationError, CorpusError) as error:
        raise SystemExit(explain(error)) from error


def explain(error: Exception) -> str:
    """Return what is wrong and what to do about it."""
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no default here; give it on the command line, {error.full_key}=…"
    if isinstance(error.__cause__, (ConfigAttributeError, ConfigKeyError)):
        return f"{_unknown_key(error.__cause__)}\n{error}"
    return str(error)


def _unknown_key(error: ConfigAttributeError | ConfigKeyError) -> str:
    parent, _, key = str(error.full_key).rpartition(".")
    if parent == "techniques":
        return f"there is no technique '{key}' yet; add it before: '+technique@techniques.{key}=CHOICE'"
    place = f"'{parent}'" if parent else "the configuration"
    known = sorted(str(name) for name in error.parent_node or () if not str(name).startswith("_"))
    return f"{place} has no key '{key}'; " + (f"choose one of: {', '.join(known)}" if known else "it holds one value")


def check_techniques(config: DictConfig) -> None:
    """Refuse techniques that the chosen strategy would not look at."""
    strategy = config.strategy._target_.rpartition(".")[2]
    if config.techniques and "_args_" not in config.strategy:
        raise checks.ConfigurationError(
            f"techniques={list(config.techniques)} need strategy=hybrid; {strategy} takes none"
        )
    if "technique" in config:
        raise checks.ConfigurationError("a technique has a name, as zero in '+technique@techniques.zero=zero'")


def check_sample(config: DictConfig) -> None:
    """Refuse at the beginning what would fail at the end."""
    checks.whole(1, sample__count=config.sample.count)
    checks.number(0, sample__temperature=config.sample.temperature)
    checks.whole(0, seed=config.seed)


def check_vocabulary(data: int, model: int) -> None:
    """Refuse data whose ids the model does not know."""
    if data > model:
        raise CorpusError(
            f"data.vocab_size={data} is more than the model's model.config.vocab_size={model}; make them equal "
            f"(the first follows the second unless it is set)"
        )
