"""Models with towers: parts that can run alone, one for each kind of input (CLIP: texts and images)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError
from lamina.layers.hooks import DECODER_INPUTS, StopForward, run_until_stopped
from lamina.layers.probe_input import MAIN_INPUTS
from lamina.layers.stack import LayerStack, children_of


def towers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return tower name ("text", "vision") -> tower: parts of a model that are models and read different inputs.

    {} unless there are at least two. The encoder and decoder of an encoder-decoder are not towers.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {}
    children = {name: child for name, child in children_of(model).items() if hasattr(child, "config")}
    reads = {name: getattr(child, "main_input_name", None) for name, child in children.items()}
    known = [name for name, main_input in reads.items() if main_input in MAIN_INPUTS]
    several = len({reads[name] for name in known}) == len(known) > 1
    return {name.removesuffix("_model"): children[name] for name in known} if several else {}


def tower_for(stacks: Mapping[str, LayerStack], inputs: Iterable[str]) -> str | None:
    """Return the name of the stack whose tower reads one of `inputs` (names of the model's arguments).

    None if the model has no towers, or none that reads any of them.
    """
    towers = {name: getattr(stack.tower, "main_input_name", None) for name, stack in stacks.items()}
    return next((name for known in inputs for name, main_input in towers.items() if main_input == known), None)


def tower_inputs(stack: LayerStack, batch: Mapping[str, object]) -> Mapping[str, object]:
    """Return those entries of a batch that the stack's tower accepts; the whole batch if the stack has no tower."""
    if stack.tower is None:
        return batch
    accepted = inspect.signature(stack.tower.forward).parameters
    return {name: value for name, value in batch.items() if name in accepted}


def run_stacks(model: nn.Module, stacks: Iterable[LayerStack], batch: Mapping[str, object], stop: StopForward) -> Any:
    """Run the part of a model that the given stacks need: the model itself, or only their towers, one after the other.

    If the batch has no decoder input, the decoder reads the encoder's tokens, shifted right behind the start token.
    BART does this itself, T5 does not.

    Args:
        model: The model.
        stacks: The stacks whose layers are needed.
        batch: Keyword arguments of the model.
        stop: The exception by which a hook ends the forward early.

    Returns:
        The model's output; None if a hook stopped the forward, or if towers were run.

    Raises:
        ConfigError: If the batch has no input for one of the towers.
    """
    stacks = list(stacks)
    if not stacks or any(stack.tower is None for stack in stacks):
        return run_until_stopped(model, {**_decoder_inputs(model, stacks, batch), **batch}, stop)
    for stack in stacks:
        name = str(getattr(stack.tower, "main_input_name", "input_ids"))
        if batch.get(name) is None and batch.get("inputs_embeds") is None:
            problem = f"the batch has no '{name}', only {', '.join(batch)}; the stack '{stack.name}' reads it"
            raise ConfigError(f"bank: {problem}. Name the readers that are to run: readers=[...].")
    for stack in stacks:
        run_until_stopped(stack.tower or model, tower_inputs(stack, batch), stop)
    return None


def _decoder_inputs(model: nn.Module, stacks: Iterable[LayerStack], batch: Mapping[str, object]) -> dict[str, Tensor]:
    """Return `decoder_input_ids` made from the encoder's tokens, if a decoder is needed and has no input; else {}."""
    ids, start = batch.get("input_ids"), getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    decodes = any(stack.name == "decoder" for stack in stacks)
    if (
        not decodes
        or not isinstance(ids, Tensor)
        or start is None
        or any(batch.get(name) is not None for name in DECODER_INPUTS)
    ):
        return {}
    return {"decoder_input_ids": torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)}
