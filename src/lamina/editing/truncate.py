"""Remove the top blocks of a stack, and adapt the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.editing.block_order import rearrange
from lamina.editing.editable import movable_stack
from lamina.editing.record import Edit, record
from lamina.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OP = "truncate_"


def truncate_(model: PreTrainedModel, keep: int, stack: str | None = None) -> Edit:
    """Keep the bottom blocks of a stack and remove the others, in place.

    Modules after the blocks (a final norm, pooler, head) stay. The config gets the new depth, so that the model can be
    saved with `save_pretrained` and loaded with plain `AutoModel`. `keep_` and `drop_` remove any blocks.

    Args:
        model: A transformers model.
        keep: Number of blocks to keep, from 1 to the depth. If it equals the depth, nothing is removed or recorded.
        stack: Name of the stack. None: the only one, or the encoder. A model with towers (CLIP) has no default.

    Returns:
        The edit; its `layers` are the removed blocks.

    Raises:
        ConfigError: If `keep` is out of range, the shape of another part of the model depends on the depth, the model
            has several towers and none is named, or the model cannot be edited. The model is then unchanged.
        UnknownNameError: If the stack does not exist.
    """
    edited = movable_stack(model, stack, _OP)
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep <= edited.depth:
        raise ConfigError(
            f"{_OP}: keep is {keep!r}; the {edited.name} stack has {edited.depth} blocks, and one at least must stay. "
            f"Use 1..{edited.depth}."
        )
    removed = tuple(range(keep + 1, edited.depth + 1))
    gone = rearrange(model, edited, range(1, keep + 1), _OP).gone if removed else ()
    edit = Edit("truncate", edited.name, removed, gone, {"keep": keep, "stack": edited.name})
    return record(model, edit) if removed else edit
