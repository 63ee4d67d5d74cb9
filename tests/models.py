"""The columns of the parity table: small LightningModules with deterministic data, written as users write them.

`build("llama", seed=1, optimizer=partial(torch.optim.SGD, lr=0.1))` makes one, `loaders("llama", 8)` its data.
"""

import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

VOCABULARY = 64
IGNORED = -100

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# Where a gradient is zero but for rounding (the bias of a key projection), AdamW with its default eps divides noise by
# noise, and two correct runs part ways.
adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5)


def decay(step: int) -> float:
    return 0.9**step


class Optimized(LightningModule):
    """Any optimizer, and a learning rate that changes at every step."""

    make_optimizer: MakeOptimizer

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LanguageModel(Optimized):
    """Wraps a causal LM; says how a batch becomes logits and loss in the only method that differs."""

    def __init__(self, network: nn.Module, optimizer: MakeOptimizer = adamw) -> None:
        super().__init__()
        self.network = network
        self.make_optimizer = optimizer

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


class Llama(LanguageModel):
    """Hugging Face's Llama with grouped queries; the loss is the user's own, on labels one step ahead."""

    def __init__(self, optimizer: MakeOptimizer = adamw, **config: Any) -> None:
        super().__init__(llama(**config), optimizer)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.predict_step(batch, 0)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network(input_ids=batch["input_ids"], position_ids=batch.get("position_ids")).logits


class GPT2(LanguageModel):
    """Hugging Face's GPT-2: tied weights, fused q/k/v, learned positions; the loss is the model's own."""

    def __init__(self, optimizer: MakeOptimizer = adamw, **config: Any) -> None:
        super().__init__(gpt2(**config), optimizer)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.network(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network(input_ids=batch["input_ids"]).logits


class HuggingFace(LanguageModel):
    """Any other of Hugging Face's causal models; the loss is the model's own. `late`: built in `configure_model`."""

    def __init__(
        self, network: Callable[..., nn.Module], optimizer: MakeOptimizer = adamw, late: bool = False, **config: Any
    ) -> None:
        Optimized.__init__(self)
        self.make, self.make_optimizer = partial(network, **config), optimizer
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if "network" not in self._modules:
            self.network = self.make()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.network(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.network(input_ids=batch["input_ids"]).logits


def llama(**overrides: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = {"use_cache": False, "attn_implementation": "sdpa", "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | config | overrides)))


def gpt2(**overrides: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(GPT2Config(**(sizes | dropout | tokens | overrides)))


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "use_cache": False, "pad_token_id": None,
         "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}


def library(name: str, **config: Any) -> nn.Module:
    """A causal model of transformers, by the name of its classes."""
    import transformers

    made = getattr(transformers, f"{name}Config")(**(SMALL | config))
    return getattr(transformers, f"{name}ForCausalLM")(made)


LIBRARIES: dict[str, dict[str, Any]] = {
    "qwen3": {"name": "Qwen3", "head_dim": 8, **GROUPED},  # heads whose queries and keys are normalised
    "phi3": {"name": "Phi3", **GROUPED},  # one weight for queries, keys and values, one for gate and up
    "gpt_neox": {"name": "GPTNeoX"},  # queries, keys and values of each head side by side; feed-forward in parallel
    "mistral": {"name": "Mistral", "sliding_window": 5, **GROUPED},  # attention to the last few positions
}


OWN = {"vocab_size": VOCABULARY, "context": 64, "dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2,
       "hidden_dim": 64}  # fmt: skip


def own_gpt(optimizer: MakeOptimizer | None = None, loss_chunks: int = 1, **overrides: Any) -> LightningModule:
    from recipes.gpt import GPTConfig, GPTModule

    config, training = GPTConfig(**(OWN | overrides)), {"learning_rate": 1e-2, "warmup_steps": 2}
    return owned(GPTModule, optimizer)(config, **training, loss_chunks=loss_chunks)


def owned(kind: type[LightningModule], optimizer: MakeOptimizer | None) -> type[LightningModule]:
    """A module of ours; with its own optimizer unless another one is asked for."""

    class Own(kind):
        def configure_optimizers(self) -> Any:
            if optimizer is None:
                return super().configure_optimizers()
            self.make_optimizer = optimizer
            return Optimized.configure_optimizers(self)

    return Own


class PlainBlock(nn.Module):
    """A residual block of odd widths."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(Optimized):
    """What a user might write: odd sizes, a 0-dim parameter, parts on the module itself, every way of logging."""

    def __init__(self, optimizer: MakeOptimizer = adamw, blocks: int = 4) -> None:
        super().__init__()
        self.make_optimizer = optimizer
        self.shift = nn.Parameter(torch.zeros(13))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("spread", torch.linspace(0.5, 1.5, 13))
        self.register_buffer("bound", torch.tensor(3.0), persistent=False)
        self.stem = nn.Linear(13, 7)
        self.blocks = nn.ModuleList(PlainBlock(7, 13) for _ in range(blocks))
        self.heads = nn.ModuleList([nn.Linear(7, 5), nn.Linear(7, 1)])
        self.train_accuracy = MulticlassAccuracy(num_classes=5)
        self.val_accuracy = MulticlassAccuracy(num_classes=5)
        self.test_accuracy = MulticlassAccuracy(num_classes=5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.stem((x * self.spread + self.shift).clamp(-self.bound, self.bound))
        for block in self.blocks:
            hidden = block(hidden)
        classes, value = self.heads
        return classes(hidden) / self.temperature, value(hidden).squeeze(-1)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits, errors = self.score(batch)
        classification, regression = F.cross_entropy(logits, batch[1]), errors.square().mean()
        loss = classification + regression
        self.train_accuracy(logits, batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"classification": classification, "regression": regression}, on_step=False, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("samples", float(len(logits)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest_error", errors.abs().max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("lowest_logit", logits.min(), reduce_fx=torch.min, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.log_evaluation("val", batch, self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        self.log_evaluation("test", batch, self.test_accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])[0].argmax(-1)

    def log_evaluation(self, stage: str, batch: tuple[Tensor, Tensor, Tensor], accuracy: MulticlassAccuracy) -> None:
        logits, errors = self.score(batch)
        accuracy.update(logits, batch[1])
        self.log(f"{stage}_loss", F.cross_entropy(logits, batch[1]) + errors.square().mean(), prog_bar=True)
        self.log(f"{stage}_accuracy", accuracy)
        self.log(f"{stage}_samples", float(len(logits)), reduce_fx="sum")

    def score(self, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, _, targets = batch
        logits, values = self(inputs)
        return logits, values - targets


class TanhBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TiedWords(LightningModule):
    """Predicts words by the weight that embeds them, which two stages of a pipeline hold; counts steps in a buffer."""

    words = 19

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.layers = nn.Embedding(self.words, 8), nn.ModuleList(TanhBlock(8) for _ in range(blocks))
        self.head = nn.Linear(8, self.words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.losses: list[Tensor] = []

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1
        self.losses.append(self.trainer.callback_metrics["loss"].clone())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


COLUMNS: dict[str, Callable[..., LightningModule]] = {
    "llama": Llama,
    "gpt2": GPT2,
    "plain": Plain,
    **{name: partial(HuggingFace, library, **config) for name, config in LIBRARIES.items()},
}
if importlib.util.find_spec("recipes.gpt"):
    COLUMNS["gpt"] = own_gpt


def build(column: str, seed: int = 0, **options: Any) -> LightningModule:
    """The model of a column, or one of those in `tests.further`; the same seed makes the same weights."""
    from tests.further import MODELS

    torch.manual_seed(seed)
    return (COLUMNS | MODELS)[column](**options)


class Tokens(Dataset):
    """Sequences that a model can learn: each token follows from the one before, but for some noise."""

    def __init__(
        self,
        samples: int,
        length: int,
        *,
        seed: int,
        ignored: float = 0.0,
        positions: bool = False,
        documents: bool = False,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (samples, length + 1), generator=random)
        regular = torch.rand(samples, length, generator=random) < 0.9
        for t in range(length):
            tokens[:, t + 1] = torch.where(regular[:, t], (3 * tokens[:, t] + 1) % VOCABULARY, tokens[:, t + 1])
        labels = tokens[:, 1:].clone()
        labels[torch.rand(samples, length, generator=random) < ignored] = IGNORED
        self.fields = {"input_ids": tokens[:, :-1], "labels": labels}
        if positions:
            self.fields["position_ids"] = torch.arange(length).expand(samples, length)
        if documents:
            self.fields["documents"] = (torch.rand(samples, length, generator=random) < 0.2).cumsum(1)

    def __len__(self) -> int:
        return len(self.fields["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: field[index] for name, field in self.fields.items()}


def points(samples: int, *, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 13, generator=random, dtype=torch.get_default_dtype())
    return TensorDataset(inputs, inputs[:, :5].argmax(-1), inputs.sum(-1).tanh())


class Loaders(NamedTuple):
    """What `fit` takes."""

    train: DataLoader
    val: DataLoader


def datasets(
    column: str, *, samples: int = 24, val_samples: int = 16, length: int = 16, **options: Any
) -> tuple[Dataset, Dataset]:
    """Three batches of eight: where two are accumulated, the last is so with no other."""
    from tests.further import handwritten

    if column == "plain" or column in handwritten.MODELS:
        return points(samples, seed=1), points(val_samples, seed=2)
    return Tokens(samples, length, seed=1, **options), Tokens(val_samples, length, seed=2, **options)


def loaders(column: str, batch_size: int, *, shuffle: bool = False, **options: Any) -> Loaders:
    """Loaders of one device, which a strategy divides; the language models also take `ignored` and `positions`."""
    from tests.further import handwritten

    train, val = datasets(column, **options)
    collate = handwritten.COLLATE.get(column)
    return Loaders(
        DataLoader(train, batch_size, shuffle=shuffle, collate_fn=collate),
        DataLoader(val, batch_size, collate_fn=collate),
    )
