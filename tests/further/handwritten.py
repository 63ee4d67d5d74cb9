"""Small models of points, each in one way that a pipeline must bear without being told."""

from tests.further import built, passing
from tests.further.points import Handwritten

NOT_TRAINED = {"ReadsMemory"}  # refused
MODELS: dict[str, type[Handwritten]] = {
    name: kind
    for name, kind in (vars(passing) | vars(built)).items()
    if isinstance(kind, type) and issubclass(kind, Handwritten) and name not in NOT_TRAINED
}

COLLATE = {"Rich": built.as_points}
