"""Check, before a model is trained or saved, that it can be loaded again."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import TYPE_CHECKING

from lamina.editing.record import edits
from lamina.errors import ConfigError, LaminaError
from lamina.layers import stacks
from lamina.layers.stack import by_path
from lamina.layers.wrappers import adapted_layers
from lamina.store.models import empty_model
from lamina.store.replay import LoadingInfo, replay_inserts, weight_problem, without_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_HINT = (
    "Loading builds the model from its config, so that changes by hand are lost. Change blocks with lamina.keep_, "
    "lamina.duplicate_ or lamina.insert_, other parts by their entries of the config."
)


def check_reloads(model: PreTrainedModel, op: str) -> None:
    """Check that a model's config and recorded edits describe its weights: a saved model is built from these two.

    A model of the same class is built without memory for weights, and the names, shapes and sharing of all weights are
    compared. Quantised models are not checked, as their weights have other shapes. Classes that cannot be built from
    their config are not checked either, with a warning.

    Args:
        model: A transformers model.
        op: The operation, for messages.

    Raises:
        ConfigError: If, in the model that would be loaded, a weight is missing, has another shape or has no place, or a
            weight that blocks share now would not be shared.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return
    try:
        problem = _problem(model, _rebuilt(model), "")
    except LaminaError as error:
        logger.warning("%s: whether the saved model will load again was not checked: %s", op, error)
        return
    if problem is not None:
        raise ConfigError(f"{op}: this {type(model).__name__} could not be loaded again: {problem}. {_HINT}")


def changed_blocks(model: PreTrainedModel) -> str | None:
    """Return how a model's blocks differ from those that its config and edits describe, as text; None if they do not.

    Only the weights in blocks are compared, because a base model may lack other parts, such as a pooler. Models that
    cannot be built from their config, quantised ones, and those with adapters are not compared.
    """
    if getattr(model.config, "quantization_config", None) is not None or adapted_layers(model):
        return None
    paths = {module: path for path, module in by_path(model).items()}
    blocks = [block for stack in stacks(model).values() for block in stack.blocks]
    owners = {paths[block].replace("_orig_mod.", "").rpartition(".")[0] for block in blocks if block in paths}
    try:
        empty = _rebuilt(model)
        problems = (_problem(model, empty, f"{owner}.") for owner in sorted(owners))
        return next((problem for problem in problems if problem is not None), None)
    except LaminaError:
        return None


def _rebuilt(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model without weights, built from a model's config and edits; LaminaError if that is impossible."""
    empty = empty_model(deepcopy(model.config), type(model))
    replay_inserts(empty, edits(model))
    return empty


def _problem(model: PreTrainedModel, empty: PreTrainedModel, under: str) -> str | None:
    """Return why a model cannot be built again from its config and its edits, as text; None if it can.

    Args:
        model: The model.
        empty: The model without weights that was built from the config and the edits.
        under: Only weights whose names begin with this text are compared; "" for all.
    """
    own, expected = _shapes(model, under), _shapes(empty, under)
    report = LoadingInfo(
        missing_keys=expected.keys() - own.keys(), unexpected_keys=own.keys() - expected.keys(), mismatched_keys=set()
    )
    problem = weight_problem(empty, report, exact=True)
    for name in sorted(own.keys() & expected.keys()):
        if problem is None and own[name] != expected[name]:
            problem = f"the weight '{name}' is {list(own[name])}, and its config says {list(expected[name])}"
    if problem is None:
        for group in _shared_by_blocks(model, under) - _shared_by_blocks(empty, under):
            return f"the weights {' and '.join(map(repr, sorted(group)[:2]))} are shared, which its config does not say"
    return problem


def _named(model: nn.Module, under: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, weight) for weights whose name begins with `under`, without a compiled model's prefixes.

    A shared weight is yielded once per name.
    """
    for name, weight in model.named_parameters(remove_duplicate=False):
        if (plain := name.replace("_orig_mod.", "")).startswith(under):  # the name in a model that is not compiled
            yield plain, weight


def _shapes(model: nn.Module, under: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in _named(model, under)}


def _shared_by_blocks(model: nn.Module, under: str) -> set[frozenset[str]]:
    """Return a set of names for each weight that several blocks share; the names differ only in block numbers.

    Only weights whose name begins with `under` are considered.
    """
    names: dict[tuple[int, str], list[str]] = {}
    for name, weight in _named(model, under):
        names.setdefault((id(weight), without_numbers(name)), []).append(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}
