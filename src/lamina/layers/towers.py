"""Models with a tower for each kind of input (CLIP: one of texts, one of images), each of which runs by itself."""

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
    """The parts of a model that are models with inputs of their own, by name ("text", "vision"); {} unless several.

    The encoder and the decoder of one model are not such parts.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {}
    children = {name: child for name, child in children_of(model).items() if hasattr(child, "config")}
    reads = {name: getattr(child, "main_input_name", None) for name, child in children.items()}
    known = [name for name, own in reads.items() if own in MAIN_INPUTS]
    several = len({reads[name] for name in known}) == len(known) > 1
    return {name.removesuffix("_model"): children[name] for name in known} if several else {}


def tower_for(stacks: Mapping[str, LayerStack], inputs: Iterable[str]) -> str | None:
    """The name of the stack whose tower reads one of these inputs; None where the model has no towers, or no such."""
    towers = {name: getattr(stack.tower, "main_input_name", None) for name, stack in stacks.items()}
    return next((name for known in inputs for name, own in towers.items() if own == known), None)


def tower_inputs(stack: LayerStack, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of what a model is called with, what the tower of a stack takes; all of it where the model has no towers."""
    if stack.tower is None:
        return batch
    accepted = inspect.signature(stack.tower.forward).parameters
    return {name: value for name, value in batch.items() if name in accepted}


def run_stacks(model: nn.Module, stacks: Iterable[LayerStack], batch: Mapping[str, Any], stop: StopForward) -> Any:
    """Run what stacks need of a model on a batch, until a hook raises `stop`: the model, or their towers one by one.

    Returned is what the model gave; None if it was stopped, or towers ran. A decoder that is given no text of its own
    reads the encoder's, shifted right behind the start token, as BART's does by itself and T5's does not.

    Raises:
        ConfigError: If the batch has nothing for a tower.
    """
    stacks = list(stacks)
    if not stacks or any(stack.tower is None for stack in stacks):
        return run_until_stopped(model, {**_decoder_inputs(model, stacks, batch), **batch}, stop)
    for stack in stacks:
        name = str(getattr(stack.tower, "main_input_name", "input_ids"))
        if batch.get(name) is None and batch.get("inputs_embeds") is None:
            came = f"the batch has no '{name}', only {', '.join(batch)}; the stack '{stack.name}' reads it"
            raise ConfigError(f"bank: {came}. Name the readers that are to run: readers=[...].")
    for stack in stacks:
        run_until_stopped(stack.tower or model, tower_inputs(stack, batch), stop)
    return None


def _decoder_inputs(model: nn.Module, stacks: Iterable[LayerStack], batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a decoder among the stacks reads of a batch with texts for the encoder alone."""
    ids, start = batch.get("input_ids"), getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    decodes = any(stack.name == "decoder" for stack in stacks)
    if not decodes or ids is None or start is None or any(batch.get(name) is not None for name in DECODER_INPUTS):
        return {}
    return {"decoder_input_ids": torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)}
