"""Masked language modelling: logits of masked tokens, over the vocabulary of the base model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import nn
from torch.nn import functional as F

from lamina.heads.vocabulary import Activation, Projection, Transform, VocabularyConfig, VocabularyHead, vocabulary_of
from lamina.layers.devices import main_device
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import NoInputError, probe_input
from lamina.layers.stack import alike

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_CLOSE = 1e-3  # relative to the largest logit; a wrong activation or order is off by far more


@final
@dataclass(frozen=True)
class MaskedLM(VocabularyConfig):
    """A head for masked language modelling: linear map, activation, LayerNorm, then the model's vocabulary projection.

    The head has its own bias. On a model with a head for masked language modelling (`BertForMaskedLM`), the linear map,
    activation, norm and bias are initialised as copies of that head's, if the copies give the same logits. Otherwise
    they are new, with GELU. The projection belongs to the base model: it is neither copied nor saved, and only changes
    if the base model is trained.

    Source:
        Devlin et al. 2019, arXiv:1810.04805, section 3.1; ElNokrashy et al. 2024, "Depth-Wise Attention (DWAtt)",
        section 3.2.
    """

    kind: ClassVar[str] = "masked_lm"

    def build_on(self, model: PreTrainedModel, dim: int) -> MaskedLMHead:
        """Return a new module for features of size `dim` on `model`; ConfigError if the model has no vocabulary.

        The model may be run on a tiny input.
        """
        projection = vocabulary_of(model, self.kind)
        transform = _copy_transform(model, projection)
        if transform is None:
            classes, width = projection.weight.shape
            bias = nn.Parameter(torch.zeros(classes))
            transform = Transform(nn.Linear(dim, width), F.gelu, nn.LayerNorm(width), bias)
        return MaskedLMHead(projection, transform, dim)


@final
class MaskedLMHead(VocabularyHead):
    """The module of `MaskedLM`; logits as `VocabularyHead.forward` returns them, one class per vocabulary entry."""


def _copy_transform(model: PreTrainedModel, projection: Projection) -> Transform | None:
    """Return trainable float32 copies of the other parts of a model's own masked language modelling head.

    These are a linear map, an activation, a norm and a bias; `projection` is the head's map onto the vocabulary. None
    if the model has no such head, or if the parts do not compute the model's logits (not checked on the meta device).
    """
    classes, width = projection.weight.shape
    inside = set(model.base_model.modules())
    outside = [module for module in model.modules() if module not in inside and module is not projection]
    maps = [part for part in outside if isinstance(part, nn.Linear) and part.out_features == width]
    norms = [part for part in outside if isinstance(part, nn.LayerNorm) and part.normalized_shape == (width,)]
    if len(maps) != 1 or len(norms) != 1:
        return None
    # the bias of the logits belongs to the projection, or is a vector of that size in the head
    parameters = (parameter for module in (projection, *outside) for parameter in module.parameters(recurse=False))
    biases = (nn.Parameter(parameter.detach()) for parameter in parameters if parameter.shape == (classes,))
    bias = next(biases, nn.Parameter(torch.zeros(classes, device=main_device(model))))
    parts = [Transform(maps[0], activation, norms[0], bias) for activation in _activations(model.config)]
    transform = parts[0] if main_device(model).type == "meta" else _first_equal(model, projection, parts)
    if transform is None:
        return None
    dense, norm = (copy.deepcopy(part).float().requires_grad_(True) for part in (maps[0], norms[0]))
    return transform._replace(dense=dense, norm=norm, bias=nn.Parameter(bias.detach().clone().float()))


def _activations(config: PretrainedConfig) -> Iterator[Activation]:
    """Yield the activation functions that a config names, then other common ones."""
    from transformers.activations import ACT2FN

    named = [value for key, value in vars(config).items() if key.endswith(("_act", "activation"))]
    for name in dict.fromkeys([*named, "gelu", "gelu_new", "relu", "tanh", "linear"]):
        if isinstance(name, str) and name in ACT2FN:
            yield ACT2FN[name]


@torch.no_grad()
def _first_equal(model: PreTrainedModel, projection: Projection, parts: Sequence[Transform]) -> Transform | None:
    """Return the first candidate in `parts` that turns the model's last state into its logits; None if none does.

    None also if no input for the model is known, or the model returns no logits.
    """
    try:
        inputs = probe_input(model, 8, seed=0).inputs
    except NoInputError:
        return None
    with preserve_model(model):
        out = model(**inputs, output_hidden_states=True, return_dict=True)
        states, logits = out.get("hidden_states"), out.get("logits", out.get("prediction_logits"))
        if states is None or logits is None:
            return None
        computed = ((part, part.logits(states[-1], projection.weight)) for part in parts)
        return next((part for part, candidate in computed if alike(candidate, logits, _CLOSE)), None)
