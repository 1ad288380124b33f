"""Models with towers: parts that can run alone, one for each kind of input (CLIP has one for texts, one for images)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from lamina.layers.probe_input import MAIN_INPUTS
from lamina.layers.stack import LayerStack, children_of


def towers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return tower name ("text", "vision") -> tower, for the parts of a model that are models with inputs of their own.

    The result is {} unless there are at least two parts, with different inputs. Encoder and decoder of an
    encoder-decoder are not towers.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {}
    children = {name: child for name, child in children_of(model).items() if hasattr(child, "config")}
    reads = {name: getattr(child, "main_input_name", None) for name, child in children.items()}
    known = [name for name, main_input in reads.items() if main_input in MAIN_INPUTS]
    several = len({reads[name] for name in known}) == len(known) > 1
    return {name.removesuffix("_model"): children[name] for name in known} if several else {}


def tower_for(stacks: Mapping[str, LayerStack], inputs: Iterable[str]) -> str | None:
    """Return the name of the stack whose tower reads the first known name in `inputs` (names of the model's arguments).

    None if the model has no towers, or no tower reads any of `inputs`.
    """
    towers = {name: getattr(stack.tower, "main_input_name", None) for name, stack in stacks.items()}
    return next((name for known in inputs for name, main_input in towers.items() if main_input == known), None)
