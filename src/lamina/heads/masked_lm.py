"""The word behind a mask: masked language modelling with the base's own vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.heads.base import IGNORE, Head, HeadConfig, cross_entropy, label_names
from lamina.layers.isolation import main_device, preserve_model
from lamina.layers.probe_input import NoInputError, probe_input
from lamina.layers.stack import alike

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from transformers import PreTrainedModel

Activation = Callable[[Tensor], Tensor]
Projection = nn.Linear | nn.Embedding
LABELS = ("token",)  # the classes are the base's vocabulary, which is not listed
_CLOSE = 1e-3  # relative to the largest logit; a wrong activation or order is off by far more


@final
@dataclass(frozen=True)
class MaskedLM(HeadConfig):
    """Dense, activation, LayerNorm, then the base's own vocabulary projection with a bias of its own.

    On a base with a head for masked language modelling (`BertForMaskedLM`) the first three and the bias start as a copy
    of that head's; on any other they start fresh. The projection is the base's and is neither copied nor saved; it
    stays as it is unless the base itself is trained.

    Source:
        Devlin et al. 2019, arXiv:1810.04805, section 3.1; ElNokrashy et al. 2024, "Depth-Wise Attention (DWAtt)",
        section 3.2.
    """

    labels: Sequence[str] = LABELS  # no others

    kind: ClassVar[str] = "masked_lm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", label_names(self.kind, self.labels))
        if self.labels != LABELS:
            raise ConfigError(f"{self.kind}: labels are {self.labels}; the classes are the base's vocabulary.")

    def build(self, dim: int) -> MaskedLMHead:
        """Raise ConfigError: the base is needed."""
        came = f"only the size {dim} of the features was given"
        raise ConfigError(f"{self.kind}: {came}; it projects onto a model's vocabulary. Attach the reader to a bank.")

    def build_on(self, model: PreTrainedModel, dim: int) -> MaskedLMHead:
        """Make the module for a model that is at hand; ConfigError if it has no vocabulary."""
        projection = vocabulary_of(model)
        transform = _own_transform(model, projection)
        if transform is None:
            classes, width = projection.weight.shape
            bias = nn.Parameter(torch.zeros(classes))
            transform = _Transform(nn.Linear(dim, width), F.gelu, nn.LayerNorm(width), bias)
        return MaskedLMHead(projection, transform, dim)


class _Transform(NamedTuple):
    """What stands between features and vocabulary."""

    dense: nn.Linear
    activation: Activation
    norm: nn.LayerNorm
    bias: nn.Parameter

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        hidden = self.norm(self.activation(self.dense(hidden)))
        return F.linear(hidden.to(weight.dtype), weight, self.bias.to(weight.dtype))


@final
class MaskedLMHead(Head):
    """The module of `MaskedLM`; logits `[batch, tokens, classes]`, a class per entry of the base's vocabulary.

    The base's `projection` (`weight` `[classes, width]`) is kept by reference: it follows the base to its device and is
    no part of this module's state. Where the transform takes features of another size, `enter` maps them first.
    """

    logits_to_keep: ClassVar[bool] = True

    def __init__(self, projection: Projection, transform: _Transform, dim: int) -> None:
        super().__init__()
        self._projection = (projection,)  # in a tuple, so that nn.Module does not register it
        width = transform.dense.in_features
        self.enter = nn.Linear(dim, width) if dim != width else None
        self.dense, self._activation, self.norm, self.bias = transform

    def forward(
        self,
        features: Float[Tensor, "batch tokens dim"],
        mask: Bool[Tensor, "batch tokens"],
        logits_to_keep: Bool[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens classes"] | Float[Tensor, "kept classes"]:
        """Logits of each token, in the dtype of the base's projection; those of padding mean nothing.

        With `logits_to_keep`, those of these positions alone, in row order: the vocabulary is large, and a loss needs
        only the some 15 % of the positions that have a label.
        """
        if logits_to_keep is not None:
            features = features[logits_to_keep]
        hidden = features.to(self.dense.weight.dtype)
        if self.enter is not None:
            hidden = self.enter(hidden)
        transform = _Transform(self.dense, self._activation, self.norm, self.bias)
        return transform.logits(hidden, self._projection[0].weight)

    def is_token_wise(self) -> bool:
        """Every token's logits come of its features alone."""
        return True

    @property
    def outputs(self) -> int:
        """Size of the base's vocabulary."""
        return len(self._projection[0].weight)

    def borrowed(self) -> dict[str, Tensor]:
        """The projection's weight."""
        return {"vocabulary": self._projection[0].weight}

    def loss(self, logits: Tensor, labels: Int[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
        """Mean cross-entropy over tokens whose label is not IGNORE; of all logits, or of those of just these tokens."""
        given = labels != IGNORE
        return cross_entropy(logits if logits.ndim == 2 else logits[given], labels[given], None)


def vocabulary_of(model: PreTrainedModel) -> Projection:
    """The module whose `weight` `[classes, width]` maps onto the vocabulary: output embeddings, else the input's."""
    for find in (model.get_output_embeddings, model.get_input_embeddings):
        try:
            module = find()
        except NotImplementedError:
            continue
        if isinstance(module, Projection):
            return module
    came = f"the family '{model.config.model_type}' has no vocabulary"
    raise ConfigError(f"masked_lm: {came}. Use a model that reads text.")


def _own_transform(model: PreTrainedModel, projection: Projection) -> _Transform | None:
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
    parts = [_Transform(maps[0], activation, norms[0], bias) for activation in _activations(model.config)]
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
def _first_equal(model: PreTrainedModel, projection: Projection, parts: Sequence[_Transform]) -> _Transform | None:
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
