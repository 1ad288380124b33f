"""The word that comes next: causal language modelling with the base's own vocabulary."""

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
    """A linear map, then the base's own vocabulary projection with a bias of its own: the logits of the next token.

    Features as wide as the projection start unchanged, so that `Reader(LastLayer(), CausalLM())` starts as the base's
    own head, but for what some bases do to their logits (Gemma 2's cap, Granite's scale). The projection is the base's
    and is neither copied nor saved; it stays as it is unless the base itself is trained.

    A token's features must come of the tokens up to it alone, or the token that is asked for would be seen: the base is
    a causal language model, and the fusion token-wise.

    Source:
        Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", equations 1 and 2; the
        linear map is ours.
    """

    kind: ClassVar[str] = "causal_lm"

    def build_on(self, model: PreTrainedModel, dim: int) -> CausalLMHead:
        """Make the module for a model that is at hand; ConfigError if it has no vocabulary."""
        projection = vocabulary_of(model, self.kind)
        classes, width = projection.weight.shape
        dense, own = nn.Linear(dim, width), getattr(projection, "bias", None)
        if dim == width:
            nn.init.eye_(dense.weight)
            nn.init.zeros_(dense.bias)
        bias = nn.Parameter(torch.zeros(classes) if own is None else own.detach().clone().float())
        return CausalLMHead(projection, Transform(dense, nn.Identity(), nn.Identity(), bias), dim)


@final
class CausalLMHead(VocabularyHead):
    """The module of `CausalLM`."""

    def check_reads(self, model: PreTrainedModel, stack: LayerStack, fusion: Fusion) -> None:
        """Raise ConfigError if a token's features may depend on later tokens."""
        came = None
        if stack.name != "main":
            came = f"the stack '{stack.name}' is one of two, which read different texts"
        elif main_device(model).type != "meta" and not is_causal(model, stack):
            came = "the states of a token change with later tokens, so that it would see what it is to predict"
        if came is not None:
            raise ConfigError(f"causal_lm: in {type(model).__name__} {came}. Use a causal language model, or MaskedLM.")
        if not fusion.is_token_wise():
            name, rule = type(fusion.config).__name__, "it would see the tokens that it is to predict"
            raise ConfigError(
                f"causal_lm: the fusion {name}, as it is set, looks at more than a token's own states; {rule}. Use a "
                "token-wise one, such as ScalarMix, Concat, or AdaLayers without positions."
            )
