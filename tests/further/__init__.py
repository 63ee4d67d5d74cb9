"""Models beside the columns of the parity table, each for what is odd in it; `tests.models.build` makes them."""

from tests.further import experts, handwritten, language, libraries

MODELS = experts.MODELS | handwritten.MODELS | language.MODELS | libraries.MODELS | libraries.HOOKED
