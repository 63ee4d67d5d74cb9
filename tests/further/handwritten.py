"""Small models of points, each in one way that a pipeline must bear without being told."""

from collections.abc import Callable

from tests.further.blocks import Between, Differing, Growing
from tests.further.built import (
    Asking,
    Direct,
    FrozenFront,
    Nested,
    Normalised,
    OnlyTheFrontLearns,
    Parts,
    Regularised,
    Rich,
    Sequence,
    Shared,
    TakingTurns,
    UnusedHead,
    UnusedTower,
    as_points,
)
from tests.further.changing import CastsItself, LendsWeights, ReplacesBuffers
from tests.further.hooked import Collected, CollectedInTheStep
from tests.further.passing import (
    Dataclasses,
    Dicts,
    Gated,
    InPlace,
    Losses,
    Masked,
    Referred,
    Skip,
    Tuples,
    Unet,
    Views,
)
from tests.further.points import Handwritten

MODELS: dict[str, Callable[..., Handwritten]] = {
    kind.__name__: kind
    for kind in (
        Handwritten,
        Tuples,
        Dicts,
        Dataclasses,
        InPlace,
        Views,
        Growing,
        Differing,
        Between,
        Collected,
        CollectedInTheStep,
        Skip,
        Unet,
        Losses,
        Masked,
        Gated,
        Sequence,
        Direct,
        Parts,
        TakingTurns,
        FrozenFront,
        OnlyTheFrontLearns,
        Shared,
        Regularised,
        UnusedHead,
        UnusedTower,
        Asking,
        Nested,
        Normalised,
        Rich,
        CastsItself,
        ReplacesBuffers,
        LendsWeights,
        Referred,
    )
}

COLLATE = {"Rich": as_points}
