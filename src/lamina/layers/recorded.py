"""A model without weights that stands for a model whose hidden states were recorded, to train readers on these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn, final

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lamina.errors import ConfigError
from lamina.layers.stack import LayerStack, TapPoint

StatesPooling = Literal["first", "last", "mean"]


@final
@dataclass(frozen=True)
class RecordedFacts:
    """The known facts about a model whose states were recorded.

    Attributes:
        stack: Name of the stack: "main", "encoder", "decoder" or the name of a tower.
        depth: Number of blocks of the stack.
        width: Size of a hidden state.
        layers: Layers that were recorded, ascending; 0 is the embeddings.
        pooling: How the states of a text's tokens became one: "first", "last" or "mean". None: all tokens' states are
            there.
        model: Hub id or folder of the model. None: unknown.
        model_type: The model's family, as in its config. None: unknown.
        fingerprint: Fingerprint of the stack's weights. None: unknown.
    """

    stack: str
    depth: int
    width: int
    layers: tuple[int, ...]
    pooling: StatesPooling | None = None
    model: str | None = None
    model_type: str | None = None
    fingerprint: str | None = None


class RecordedConfig(PreTrainedConfig):
    """The config of a `RecordedModel`: its number of blocks and its width."""

    model_type = "lamina_recorded"

    def __init__(self, depth: int = 1, width: int = 1, **options: Any) -> None:  # noqa: ANN401
        super().__init__(**options)
        self.num_hidden_layers, self.hidden_size = depth, width


@final
class RecordedModel(PreTrainedModel):
    """A model without weights, with the layers of a model whose states were recorded. A bank can be trained on it.

    It cannot compute anything: `forward` raises ConfigError.
    """

    config_class = RecordedConfig

    def __init__(self, facts: RecordedFacts) -> None:
        super().__init__(RecordedConfig(facts.depth, facts.width))  # pyright: ignore[reportUnknownMemberType]
        self.facts = facts
        self.layers = nn.ModuleList(nn.Identity() for _ in range(facts.depth + 1))
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)  # gives the model a device and a dtype
        self.fingerprint_facts = repr(facts)
        self.post_init()

    def own_stack(self) -> LayerStack:
        """Return the recorded stack. Its layers are modules that are never called."""
        modules = tuple(self.layers)
        points = tuple(TapPoint(module, f"layers.{at}", "output", None, 0) for at, module in enumerate(modules))
        return LayerStack(self.facts.stack, self.facts.width, modules[1:], points, self, "", (self,))

    def forward(self, *_args: object, **_batch: object) -> NoReturn:
        """Raise ConfigError: the model has no weights to compute with."""
        hint = "Attach the model: bank.attach(model, tokenizer), or ReaderBank.from_pretrained(folder, model)."
        problem = "it was made from recorded states and has no model, so it cannot read an input"
        raise ConfigError(f"bank: {problem}. {hint}")
