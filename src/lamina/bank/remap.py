"""Let a bank's readers follow their layers, after blocks of the model were dropped, moved or repeated."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from lamina.errors import ConfigError
from lamina.layers.block_moves import MOVES, Move, moved, order_of
from lamina.layers.selectors import ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor, nn

    from lamina.bank.reader import ReaderModule
    from lamina.fusion.base import FusionConfig
    from lamina.layers import LayerStack

_OP = "bank.remap_"
_IN_PLACE = ("freeze", "merge")  # edits that leave every state as it was, up to rounding
_HINT = "Train it again in a new bank on the edited model."


def fusion_after(
    name: str,
    reader: ReaderModule,
    before: LayerStack,
    after: LayerStack,
    edits: Sequence[Move],
    stacks: Collection[str],
) -> FusionConfig:
    """Return a reader's fusion config with the numbers that its layers have after edits of the model.

    Args:
        name: Name of the reader, for messages.
        reader: The reader.
        before: The stack for which the reader was made.
        after: The same stack of the edited model.
        edits: The edits that lead from `before` to `after`, oldest first.
        stacks: Names of the model's stacks. An edit of another part of the model may have changed any state.

    Raises:
        ConfigError: If a layer that the reader reads is gone or has other values; or if its number or the depth has
            changed and the fusion cannot follow: it has no setting for its layers, or reads inside the blocks.
    """
    config, depth = reader.config.fusion, before.depth
    blocks = _blocks_after(depth, edits, before.name, stacks)
    below = [] if blocks is None else [[block for block in blocks[:place] if block] for place in range(len(blocks) + 1)]
    same = {layer: [*range(1, layer + 1)] for layer in range(before.layers)}  # the blocks that make its state
    places = {layer: below.index(made) for layer, made in same.items() if made in below}
    if depth in places and before.points[-1].module not in before.blocks:  # its state comes after a norm
        places[depth] = after.depth
        if below[-1] != same[depth]:
            del places[depth]
    if after.points[-1].module not in after.blocks:
        places = {layer: now for layer, now in places.items() if now < after.depth or layer == depth}
    reads = f"the reader '{name}' reads layers {ranges(reader.layers)} of the {before.name} stack"
    if lost := [layer for layer in reader.layers if layer not in places]:
        problem = f"layer {lost[0]} is gone or has other values than before the edit"
        raise ConfigError(f"{_OP}: {reads}; {problem}. {_HINT}")
    now = tuple(places[layer] for layer in reader.layers)
    if now == reader.layers and before.layers == after.layers:
        return config
    known = {field.name for field in fields(config)}
    if config.reads_inside or not known & {"layers", "layer"}:
        raise ConfigError(f"{_OP}: {reads}, and its fusion cannot read them under other numbers. {_HINT}")
    return replace(config, layers=now) if "layers" in known else replace(config, layer=now[0])


def _blocks_after(depth: int, edits: Sequence[Move], stack: str, stacks: Collection[str]) -> list[int] | None:
    """Return, for each block after `edits`, the number (from 1) of the block before them that computes the same.

    0 stands for an identity, and -1 for a block that computes something else. None: an edit outside of all stacks may
    have changed any state. `stack` is the name of the blocks' stack, `depth` its depth before the edits, and `stacks`
    are the names of all stacks of the model.
    """
    blocks = [*range(1, depth + 1)]
    for edit in edits:
        is_identity = edit.settings.get("identity") is True  # identity copies return what they receive
        is_same, is_here = edit.kind in _IN_PLACE or is_identity, edit.stack in (stack, "all")
        if not is_same and edit.stack not in (*stacks, "all"):
            return None  # such as the convolutions below the first block
        if is_here and (order := order_of(edit)) is not None:
            copies = [is_identity and layer in order[:place] for place, layer in enumerate(order)]
            blocks = [0 if copy else blocks[layer - 1] for layer, copy in zip(order, copies, strict=True)]
        elif not is_same and is_here:  # weights of some blocks were changed or added
            blocks = [-1 if number in edit.layers else block for number, block in enumerate(blocks, 1)]
        elif not is_same and stack == "decoder":  # its states depend on the encoder's
            blocks = [-1] * len(blocks)
    return blocks


def check_blocks(before: LayerStack, after: LayerStack, edits: Sequence[Move]) -> None:
    """Raise ConfigError unless `edits` alone lead from the blocks of the stack `before` to those of `after`."""
    origins: list[nn.Module | None] = [*before.blocks]  # None: a copy
    for edit in edits:
        if edit.stack in (before.name, "all") and (order := order_of(edit)) is not None:
            origins = [None if layer in order[:place] else origins[layer - 1] for place, layer in enumerate(order)]
    if len(origins) != len(after.blocks) or any(
        block is not None and block is not now for block, now in zip(origins, after.blocks, strict=True)
    ):
        problem = f"blocks of the {before.name} stack were changed, and not by edits"
        raise ConfigError(f"{_OP}: {problem}. Make a new bank on the edited model, and train its readers.")


def check_untrained(parameters: Mapping[str, Tensor], edits: Sequence[Move]) -> None:
    """Raise ConfigError if an identity copy of a block that `edits` added was trained.

    `parameters` are the edited model's parameters by name.
    """
    for number, edit in enumerate(edits):
        order = order_of(edit) or []
        for place, layer in enumerate(order):
            values: dict[str, float] = edit.settings.get("zeroed", {}).get(str(layer), {})
            for part, value in values.items() if layer in order[:place] else ():
                names = [f"{edit.settings['path']}.{place}.{part}"]
                for later in edits[number + 1 :]:
                    if later.kind in MOVES:
                        names = [new for name in names for new in moved(name, later)]
                trained = (name for name in names if name in parameters and bool((parameters[name] != value).any()))
                if changed := next(trained, None):
                    problem = f"an identity copy was trained ('{changed}'), and changes the states above it"
                    raise ConfigError(f"{_OP}: {problem}. Make a new bank on the edited model, and train its readers.")
