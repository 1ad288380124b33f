"""Repeat blocks of a stack: as they are, or as identity blocks that change nothing until they are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lamina.editing.block_order import rearrange
from lamina.editing.editable import blocks_of, movable_stack
from lamina.editing.identity_block import identity_values
from lamina.editing.record import Edit, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector

_OP = "duplicate_"


def duplicate_(model: PreTrainedModel, layers: Selector, *, identity: bool = True, stack: str | None = None) -> Edit:
    """Repeat blocks of a stack, in place. Copies of consecutive blocks are placed together after them.

    Blocks are numbered as everywhere: block i is layer i, from 1. In a model with 4 blocks, "2-3" gives the order 1, 2,
    3, 2, 3, 4, and [1, 3] gives 1, 1, 2, 3, 3, 4. Copies have weights of their own. If all layers are one block
    (ALBERT), that block runs more often.

    Args:
        model: A transformers model.
        layers: Layer selector: which blocks are repeated; "all" is every block.
        identity: True: the residual branches of the copies start at zero, so that the model's outputs stay the same
            until the copies are trained. The last weights of each branch are zeroed: the output projections of
            attention and feed-forward network, or a norm that follows them. False: the blocks run twice.
        stack: Name of the stack. None: the only one, or the encoder. A model with towers (CLIP) has no default.

    Returns:
        The edit, with the names of the copies' parameters.

    Raises:
        ConfigError: If layer 0 is selected; if `identity` is True and a block cannot be an identity, because a norm
            follows its residual sum (BERT) or all layers are one block; or for the reasons of `keep_`. The model is
            then unchanged.
        LayerIndexError: If a layer does not exist.
        UnknownNameError: If the stack does not exist.

    Source:
        Kim et al. 2023, "SOLAR 10.7B", arXiv:2312.15166, repeats blocks. Wu et al. 2024, "LLaMA Pro",
        arXiv:2401.02415, adds identity blocks, whose output projections start at zero.
    """
    edited = movable_stack(model, stack, _OP)
    chosen = blocks_of(edited, layers, _OP)
    zeros = identity_values(model, edited, chosen, _OP) if identity else {}
    order = _with_copies(chosen, edited.depth)
    moved = rearrange(model, edited, order, _OP)
    for place, layer in enumerate(order):
        if layer in zeros and layer in order[:place]:
            parameters = dict(model.get_submodule(f"{moved.path}.{place}").named_parameters())
            with torch.no_grad():
                for name, value in zeros[layer].items():
                    parameters[name].fill_(value)
    settings = {"layers": chosen, "identity": identity, "stack": edited.name, **moved.settings}
    if zeros:  # number of a block -> name of a parameter in it -> its value in the copy
        settings["zeroed"] = {str(layer): values for layer, values in zeros.items()}
    return record(model, Edit("duplicate", edited.name, tuple(chosen), moved.added, settings))


def _with_copies(chosen: Sequence[int], depth: int) -> list[int]:
    """Return the numbers from 1 to `depth`; each run of consecutive chosen numbers comes twice in a row."""
    order: list[int] = []
    run: list[int] = []
    for layer in range(1, depth + 1):
        order.append(layer)
        run = [*run, layer] if layer in chosen else []
        if run and layer + 1 not in chosen:
            order += run
    return order
