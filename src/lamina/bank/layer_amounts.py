"""Measure how much each layer contributes to a reader's features at each token of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.layers.preserve import evaluating

if TYPE_CHECKING:
    from lamina.bank import ReaderBank


def layer_amounts(bank: ReaderBank, names: Sequence[str], batch: Mapping[str, object]) -> dict[str, Tensor | None]:
    """Measure how much each layer contributes to readers' features at each token of one text.

    `lamina.studies.contributions` says how this is measured for each fusion. The contributions at a token need not sum
    to 1. The call runs in eval mode, without gradients.

    Args:
        bank: The readers and their model.
        names: Names of readers.
        batch: One text as inputs of the model, on the bank's device.

    Returns:
        Reader name -> contributions `[layers, tokens]`, for the layers of the reader; None if its fusion does not allow
        this measurement, as one that reads inside the blocks.

    Raises:
        ConfigError: If the frozen model has changed, or the batch is empty.
        UnknownNameError: If a reader is not in the bank.
    """
    readers = bank.select(names, "layer_amounts")
    wanted: dict[str, set[int]] = {}
    for reader in readers.values():
        wanted.setdefault(reader.stack, set()).update(reader.layers)
    with evaluating(bank), torch.no_grad():
        states = bank.record_states({stack: sorted(layers) for stack, layers in wanted.items()}, batch)
        return {
            name: None
            if reader.config.fusion.reads_inside
            else reader.fusion.contributions([states[reader.stack][layer] for layer in reader.layers])
            for name, reader in readers.items()
        }
