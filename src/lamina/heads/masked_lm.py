"""The word behind a mask: masked language modelling with the base's own vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import nn
from torch.nn import functional as F

from lamina.heads.vocabulary import Activation, Projection, Transform, VocabularyConfig, VocabularyHead, vocabulary_of
from lamina.layers.devices import main_device
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import NoInputError, probe_input
from lamina.layers.stack import alike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CLOSE = 1e-3  # relative to the largest logit; a wrong activation or order is off by far more


@final
@dataclass(frozen=True)
class MaskedLM(VocabularyConfig):
    """Dense, activation, LayerNorm, then the base's own vocabulary projection with a bias of its own.

    On a base with a head for masked language modelling (`BertForMaskedLM`) the first three and the bias start as a copy
    of that head's; on any other they start fresh. The projection is the base's and is neither copied nor saved; it
    stays as it is unless the base itself is trained.

    Source:
        Devlin et al. 2019, arXiv:1810.04805, section 3.1; ElNokrashy et al. 2024, "Depth-Wise Attention (DWAtt)",
        section 3.2.
    """

    kind: ClassVar[str] = "masked_lm"

    def build_on(self, model: PreTrainedModel, dim: int) -> MaskedLMHead:
        """Make the module for a model that is at hand; ConfigError if it has no vocabulary."""
        projection = vocabulary_of(model, self.kind)
        transform = _own_transform(model, projection)
        if transform is None:
            classes, width = projection.weight.shape
            bias = nn.Parameter(torch.zeros(classes))
            transform = Transform(nn.Linear(dim, width), F.gelu, nn.LayerNorm(width), bias)
        return MaskedLMHead(projection, transform, dim)


@final
class MaskedLMHead(VocabularyHead):
    """The module of `MaskedLM`."""


def _own_transform(model: PreTrainedModel, projection: Projection) -> Transform | None:
    """A copy of the model's own, if it has one that this module can be: shown by the logits it gives."""
    classes, width = projection.weight.shape
    inside = set(model.base_model.modules())
    outside = [module for module in model.modules() if module not in inside and module is not projection]
    maps = [part for part in outside if isinstance(part, nn.Linear) and part.out_features == width]
    norms = [part for part in outside if isinstance(part, nn.LayerNorm) and part.normalized_shape == (width,)]
    if len(maps) != 1 or len(norms) != 1:
        return None
    # what is added to the logits is the projection's bias, or a vector of that size in the head
    parameters = (parameter for module in (projection, *outside) for parameter in module.parameters(recurse=False))
    biases = (nn.Parameter(parameter.detach()) for parameter in parameters if parameter.shape == (classes,))
    bias = next(biases, nn.Parameter(torch.zeros(classes, device=main_device(model))))
    parts = [Transform(maps[0], activation, norms[0], bias) for activation in _activations(model.config)]
    own = parts[0] if main_device(model).type == "meta" else _first_equal(model, projection, parts)
    if own is None:
        return None
    dense, norm = (copy.deepcopy(part).float().requires_grad_(True) for part in (maps[0], norms[0]))
    return own._replace(dense=dense, norm=norm, bias=nn.Parameter(bias.detach().clone().float()))


def _activations(config: Any) -> Iterator[Activation]:
    """The functions that the config names, then the usual ones."""
    from transformers.activations import ACT2FN

    named = [value for key, value in vars(config).items() if key.endswith(("_act", "activation"))]
    for name in dict.fromkeys([*named, "gelu", "gelu_new", "relu", "tanh", "linear"]):
        if isinstance(name, str) and name in ACT2FN:
            yield ACT2FN[name]


@torch.no_grad()
def _first_equal(model: PreTrainedModel, projection: Projection, parts: Sequence[Transform]) -> Transform | None:
    """The first that makes the model's own logits out of its last hidden state."""
    try:
        inputs = probe_input(model, 8, seed=0).inputs
    except NoInputError:
        return None
    with preserve_model(model):
        out: Any = model(**inputs, output_hidden_states=True, return_dict=True)
        states, logits = out.get("hidden_states"), out.get("logits", out.get("prediction_logits"))
        if states is None or logits is None:
            return None
        again = ((part, part.logits(states[-1], projection.weight)) for part in parts)
        return next((part for part, own in again if alike(own, logits, _CLOSE)), None)
