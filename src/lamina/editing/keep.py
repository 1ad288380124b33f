"""Keep some blocks of a stack, or drop some, or cut the top, and adapt the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.editing.block_order import rearrange
from lamina.editing.editable import movable_stack
from lamina.editing.record import Edit, record
from lamina.errors import ConfigError
from lamina.layers import select
from lamina.layers.selectors import is_all
from lamina.utils import check_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.selectors import Selector


@check_types("truncate_")
def truncate_(model: PreTrainedModel, keep: int, stack: str | None = None) -> Edit:
    """Keep the bottom blocks of a stack and remove the others, in place.

    Modules after the blocks (a final norm, pooler, head) stay. The config is adapted, so that plain transformers loads
    the saved model.

    Args:
        model: A transformers model.
        keep: Number of blocks to keep, from 1 to the depth. If it equals the depth, nothing is removed or recorded.
        stack: Name of the stack. None: the only one, or the encoder. A model with towers (CLIP) has no default.

    Returns:
        The edit; its `layers` are the removed blocks, and its `parameters` those that are gone, under their old names.

    Raises:
        ConfigError: If `keep` is not an int in range, the family cannot have these blocks alone, the shape of another
            part of the model depends on the depth, no setting of the config holds the depth, no list holds the blocks,
            the model has several towers and none is named, or the model cannot be edited (quantised, compiled,
            offloaded, with adapters). The model is then unchanged.
        UnknownNameError: If the stack does not exist.
        UnsupportedModelError: If the model's layers cannot be found.
    """
    edited = movable_stack(model, stack, "truncate_")
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep <= edited.depth:
        rule = f"the {edited.name} stack has {edited.depth} blocks, and one at least must stay"
        raise ConfigError(f"truncate_: keep is {keep!r}; {rule}. Use 1..{edited.depth}.")
    removed = tuple(range(keep + 1, edited.depth + 1))
    gone = rearrange(model, edited, range(1, keep + 1), "truncate_").gone if removed else ()
    edit = Edit("truncate", edited.name, removed, gone, {"keep": keep, "stack": edited.name})
    return record(model, edit) if removed else edit


@check_types("keep_")
def keep_(model: PreTrainedModel, layers: Selector, *, stack: str | None = None) -> Edit:
    """Keep some blocks of a stack and remove the others, in place; a list also gives their order.

    Block i is layer i, from 1. Layer 0, the embeddings, always stays and may be named: `keep_(model, [0, 1, 4, 5])`
    keeps the embeddings and blocks 1, 4 and 5, which become blocks 1, 2 and 3. Modules around the blocks (a final norm,
    pooler, head) stay. The config is adapted, so that plain transformers loads the saved model.

    Args:
        model: A transformers model.
        layers: Layer selector: which blocks stay. A list may name them in another order, which the blocks then have.
        stack: Name of the stack. None: the only one, or the encoder. A model with towers (CLIP) has no default.

    Returns:
        The edit; its `layers` are the removed blocks, and its `parameters` those that are gone, under their old names.
        If nothing would change, both are empty and the edit is not recorded.

    Raises:
        ConfigError: If `layers` is no valid selector, no block would stay, the family cannot have this order of blocks,
            the shape of another part of the model depends on the depth, no setting of the config holds the depth, no
            list holds the blocks, the model has several towers and none is named, or the model cannot be edited
            (quantised, compiled, offloaded, with adapters). The model is then unchanged.
        LayerIndexError: If a layer does not exist.
        UnknownNameError: If the stack does not exist.
        UnsupportedModelError: If the model's layers cannot be found.

    Source:
        Men et al. 2024, "ShortGPT", arXiv:2403.03853, removes the blocks of least influence.
    """
    edited = movable_stack(model, stack, "keep_")
    chosen = select(layers, edited.layers, op="keep_")
    if isinstance(layers, list | tuple | range):
        chosen = [layer % edited.layers for layer in layers]
    return _keep(model, edited, "keep", [layer for layer in chosen if layer], chosen)


@check_types("drop_")
def drop_(model: PreTrainedModel, layers: Selector, *, stack: str | None = None) -> Edit:
    """Remove some blocks of a stack, in place, and keep the others; see `keep_`.

    Args:
        model: A transformers model.
        layers: Layer selector: which blocks are removed. Block i is layer i, from 1.
        stack: Name of the stack. None: the only one, or the encoder. A model with towers (CLIP) has no default.

    Returns:
        The edit; its `layers` are the removed blocks, and its `parameters` those that are gone, under their old names.

    Raises:
        ConfigError: If layer 0 or every block is selected, or for the reasons of `keep_`. The model is then unchanged.
        LayerIndexError: If a layer does not exist.
        UnknownNameError: If the stack does not exist.
        UnsupportedModelError: If the model's layers cannot be found.
    """
    edited = movable_stack(model, stack, "drop_")
    dropped = select("1-" if is_all(layers) else layers, edited.layers, op="drop_")
    if 0 in dropped:
        rule = "it is the embeddings, not a block, and always stays"
        raise ConfigError(f"drop_: got layer 0; {rule}. Use 1..{edited.depth}.")
    order = [layer for layer in range(1, edited.depth + 1) if layer not in dropped]
    return _keep(model, edited, "drop", order, dropped)


def _keep(model: PreTrainedModel, edited: LayerStack, kind: str, order: Sequence[int], layers: Sequence[int]) -> Edit:
    """Give the stack `edited` the blocks `order`, in place, and record an edit of `kind`; return the edit.

    `layers` are the layers that the user named. If the blocks are in that order already, nothing is recorded. Raises
    ConfigError if `order` is empty or `rearrange` refuses it.
    """
    everything = range(1, edited.depth + 1)
    if not order:
        rule = f"the {edited.name} stack has {edited.depth} blocks, and one at least must"
        raise ConfigError(f"{kind}_: no block would stay; {rule}. Keep one of 1..{edited.depth}.")
    if list(order) == list(everything):
        return Edit(kind, edited.name, (), (), {"layers": list(layers), "stack": edited.name})
    moved = rearrange(model, edited, order, f"{kind}_")
    removed = tuple(layer for layer in everything if layer not in order)
    settings = {"layers": list(layers), "stack": edited.name, **moved.settings}
    return record(model, Edit(kind, edited.name, removed, moved.gone, settings))
