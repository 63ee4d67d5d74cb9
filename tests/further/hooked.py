"""A model of Hugging Face's whose hooks collect what its routers return, for a loss of all of it."""

from functools import partial

from tests.further.libraries import four_blocks
from tests.models import GROUPED, HuggingFace

ROUTED = {
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "experts_implementation": "eager",  # the others compute in single precision at most
}

MODELS = {"routed_mixtral": partial(HuggingFace, four_blocks, name="Mixtral", **GROUPED, **ROUTED, num_local_experts=4)}
