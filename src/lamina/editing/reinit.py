"""Re-initialise blocks: their linear maps from a truncated normal, or everything with the model's own initialiser."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from lamina.editing.editable import check_editable, check_weights, select_blocks
from lamina.editing.inserted_layer import InsertedLayer
from lamina.editing.record import Edit, draw_seed, record
from lamina.errors import ConfigError, check_known
from lamina.layers.preserve import preserve_model
from lamina.utils import check_types

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence, Set

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.utils import JSON

_OP = "reinit_"
SCOPES = ("linear", "block")
_CHOICES = {"scope": SCOPES, "biases": ("keep", "zero"), "norms": ("keep", "reset")}
_FLAG = "_is_hf_initialized"  # attribute by which transformers 5 knows tensors and modules that it must not initialise


@check_types("reinit_")
def reinit_(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel,
    layers: Selector,
    *,
    scope: Literal["linear", "block"] = "linear",
    std: float = 0.02,
    bound: float = 2.0,
    biases: Literal["keep", "zero"] = "keep",
    norms: Literal["keep", "reset"] = "keep",
    stack: str | None = None,
    generator: torch.Generator | None = None,
) -> Edit:
    """Set blocks of a model to new random weights, in place. Layers that `insert_` inserted keep their weights.

    If an error is raised, the model is unchanged.

    Args:
        model: A transformers model; any family whose blocks Lamina finds.
        layers: Layer selector; layer i is block i, from 1, and "all" is every block.
        scope: "linear": draw the weights of all linear projections in the blocks from a truncated normal, including
            those of experts that are stacked in one tensor. "block": initialise everything in the blocks with the
            model's own initialiser, as in a model built from the config; `std`, `bound`, `biases` and `norms` then have
            no effect.
        std: Standard deviation of the normal distribution before truncation.
        bound: Where the distribution is truncated, in standard deviations: no weight is larger in size than `bound *
            std`.
        biases: "zero": set all biases in the blocks to 0, except those of norms. "keep": do not change them.
        norms: "reset": initialise the norms in the blocks with the model's own initialiser. "keep": do not change them.
        stack: Name of the stack. None: the only one, or the encoder.
        generator: Source of the recorded seed. None: torch's global generator.

    Returns:
        The edit, with the seed from which the same weights can be drawn again.

    Raises:
        ConfigError: If an argument is not valid; if layer 0 is selected; if the blocks share weights with other
            modules, or have no weights to set; if the model's initialiser does not set a weight; if the stack has no
            module per block; if the model has several towers and none is named, or cannot be edited (quantised,
            compiled, offloaded, with adapters).
        UnsupportedModelError: If weights of the blocks are packed (quantised) or computed (weight norm, pruning), or
            the model's layers cannot be found.
        LayerIndexError: If a layer does not exist.
        UnknownNameError: If the value of an option, or the stack, is unknown.

    Source:
        Singh and Giovanardi 2020, "How much does pre-trained information help? Partially re-initializing BERT during
        fine-tuning to analyze the contribution of layers", section 4.3: the weights of the linear projections, sigma
        0.02, truncated at 2 sigma.
    """
    for option, got in (("scope", scope), ("biases", biases), ("norms", norms)):
        check_known(_OP, [got], _CHOICES[option], option)
    for option, value in (("std", std), ("bound", bound)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{_OP}: {option} is {value}; it must be positive and finite.")
    check_editable(model, _OP)
    edited, chosen = select_blocks(model, layers, stack, _OP)
    inside = dict.fromkeys(module for layer in chosen for module in edited.blocks[layer - 1].modules())
    _check_tied(model, inside)
    check_weights(model, inside, _OP)
    settings: dict[str, JSON] = {"layers": chosen, "stack": edited.name, "scope": scope}
    seed = draw_seed(generator)
    modules = [module for module in inside if not isinstance(module, InsertedLayer)]
    changed: list[nn.Parameter] = []
    if scope == "block" or norms == "reset":
        reset = (module for module in modules if scope == "block" or _is_norm(module))
        changed += [parameter for module in reset for parameter in module.parameters(recurse=False)]
        _initialize_by_model(model, inside.keys(), changed, seed)
    if scope == "linear":
        settings |= {"std": std, "bound": bound, "biases": biases, "norms": norms}
        changed += _draw_weights(modules, std=std, bound=bound, zero=biases == "zero", seed=seed)
    if not changed:
        raise ConfigError(f"{_OP}: the named blocks have no weights that scope='{scope}' sets; nothing was changed.")
    return record(model, Edit("reinit", edited.name, tuple(chosen), _names(model, changed), settings, seed))


def _check_tied(model: PreTrainedModel, inside: Collection[nn.Module]) -> None:
    weights = {parameter for module in inside for parameter in module.parameters(recurse=False)}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter in weights and module not in inside:
                problem = f"the named blocks share weights with '{name}', which is outside them"
                raise ConfigError(f"{_OP}: {problem}. Name all blocks that share, or untie the weights first.")


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _is_linear_weight(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter, called `name` in its module, is the weight of a linear map or of several experts.

    The weights of experts are one tensor with three axes; embeddings of that form do not count.
    """
    return (parameter.ndim == 3 and "embed" not in name) or (parameter.ndim == 2 and name.endswith("weight"))


def _draw_weights(
    modules: Sequence[nn.Module], *, std: float, bound: float, zero: bool, seed: int
) -> list[nn.Parameter]:
    """Draw new weights for all linear maps among `modules`, in place, and return the changed parameters.

    Submodules are not searched: list them too. The weights come from a normal distribution with standard deviation
    `std`, truncated at `bound` standard deviations. Embeddings and convolutions keep their weights. With `zero`, all
    biases but those of norms are set to 0. Random numbers are drawn on the CPU, so that a seed gives the same weights
    on every device.
    """
    rng = torch.Generator().manual_seed(seed)
    modules = [module for module in modules if not _is_norm(module)]
    maps = [module for module in modules if not isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd))]
    of_maps = [named for module in maps for named in module.named_parameters(recurse=False)]
    weights = [weight for name, weight in of_maps if _is_linear_weight(name, weight)]
    named = [pair for module in modules for pair in module.named_parameters(recurse=False)]
    biases = [bias for name, bias in named if zero and name.endswith("bias")]
    with torch.no_grad():
        for weight in weights:
            if not weight.is_meta:
                drawn = torch.empty(weight.shape)
                # `a` and `b` are absolute
                nn.init.trunc_normal_(drawn, std=std, a=-bound * std, b=bound * std, generator=rng)
                weight.copy_(drawn)
        for bias in biases:
            bias.zero_()
    return weights + biases


def _initialize_by_model(
    model: PreTrainedModel, inside: Set[nn.Module], changed: Sequence[nn.Parameter], seed: int
) -> None:
    """Initialise the parameters in `changed` by the model itself, as if they were missing from a checkpoint.

    `inside` are all modules of the blocks; `seed` seeds torch, whose generators are restored. Raises ConfigError if a
    parameter is not set; all are then restored.
    """
    before = [(parameter, parameter._version, parameter.detach().clone()) for parameter in changed]
    with preserve_model(model), _only_uninitialized([*model.parameters(), *model.buffers()], set(changed)):
        for module in model.modules():
            setattr(module, _FLAG, inside.isdisjoint(module.modules()))
        torch.manual_seed(seed)
        model.initialize_weights()
    if left := [parameter for parameter, version, _ in before if parameter._version == version]:
        with torch.no_grad():
            for parameter, _, value in before:
                parameter.copy_(value)
        leaves = f"the initialiser of the family '{model.config.model_type}' leaves {_names(model, left)[0]} as it is"
        raise ConfigError(f"{_OP}: {leaves}; nothing was changed. Use scope='linear', norms='keep'.")


@contextmanager
def _only_uninitialized(tensors: Sequence[Tensor], free: Set[Tensor]) -> Iterator[None]:
    """Restrict transformers' initialisation to the tensors in `free`, inside the `with` block.

    The others of `tensors` are marked as already initialised there. Afterwards all tensors have their old attributes.
    """
    marks = [vars(tensor).copy() for tensor in tensors]
    try:
        for tensor in tensors:
            setattr(tensor, _FLAG, tensor not in free)
        yield
    finally:
        for tensor, mark in zip(tensors, marks, strict=True):
            vars(tensor).clear()
            vars(tensor).update(mark)


def _names(model: PreTrainedModel, parameters: Collection[nn.Parameter]) -> tuple[str, ...]:
    wanted = set(parameters)
    return tuple(name for name, parameter in model.named_parameters() if parameter in wanted)
