"""Causal language modelling: logits of the next token, over the vocabulary of the base model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import nn

from lamina.errors import ConfigError
from lamina.heads.vocabulary import Transform, VocabularyConfig, VocabularyHead, vocabulary_of
from lamina.layers.causality import is_causal
from lamina.layers.devices import main_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.fusion.base import Fusion
    from lamina.layers.stack import LayerStack


@final
@dataclass(frozen=True)
class CausalLM(VocabularyConfig):
    """A head for causal language modelling: a linear map, then the base model's vocabulary projection, and a bias.

    The logits at a token predict the next token. The bias is initialised to the base model's (0 if it has none). If the
    features have the width of the projection, the linear map is initialised to the identity. So `Reader(LastLayer(),
    CausalLM())` begins as the base model's own head. (Models that modify their logits are exceptions: Gemma 2 caps
    them, Granite scales them.) The projection belongs to the base model: it is neither copied nor saved, and only
    changes if the model is trained.

    The features of a token must not depend on later tokens, which would reveal the token to predict. So a bank raises
    ConfigError unless its model has a single stack that reads from left to right, and the fusion is token-wise.

    Source:
        Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", equations 1 and 2; the
        linear map is our addition.
    """

    kind: ClassVar[str] = "causal_lm"

    def build_on(self, model: PreTrainedModel, dim: int) -> CausalLMHead:
        """Return a new module for features of size `dim` on `model`; ConfigError if the model has no vocabulary."""
        projection = vocabulary_of(model, self.kind)
        classes, width = projection.weight.shape
        dense, base_bias = nn.Linear(dim, width), getattr(projection, "bias", None)
        if dim == width:
            nn.init.eye_(dense.weight)
            nn.init.zeros_(dense.bias)
        bias = nn.Parameter(torch.zeros(classes) if base_bias is None else base_bias.detach().clone().float())
        return CausalLMHead(projection, Transform(dense, nn.Identity(), nn.Identity(), bias), dim)


@final
class CausalLMHead(VocabularyHead):
    """The module of `CausalLM`; logits `[batch, tokens, classes]`, one class per entry of the vocabulary."""

    def check_reads(self, model: PreTrainedModel, stack: LayerStack, fusion: Fusion) -> None:
        """Raise ConfigError if a token's features may depend on later tokens, because of the model or of the fusion.

        The model is run on a tiny input to find out, except on the meta device. Any stack but "main" is refused too:
        those of encoder-decoders and towers.
        """
        problem = None
        if stack.name != "main":
            problem = f"the stack '{stack.name}' belongs to an encoder-decoder or a tower; only 'main' is allowed"
        elif main_device(model).type != "meta" and not is_causal(model, stack):
            problem = "the states of a token change with later tokens, so that it would see what it is to predict"
        if problem is not None:
            hint = "Use a causal language model, or MaskedLM."
            raise ConfigError(f"causal_lm: in {type(model).__name__} {problem}. {hint}")
        if not fusion.is_token_wise():
            name = type(fusion.config).__name__
            problem = f"the fusion {name}, as it is set, looks at more than a token's own states"
            rule = "it would see the tokens that it is to predict"
            hint = "Use a token-wise one, such as ScalarMix, Concat, or AdaLayers without positions."
            raise ConfigError(f"causal_lm: {problem}; {rule}. {hint}")
