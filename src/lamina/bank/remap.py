"""Let a bank's readers follow their layers, after blocks of the model were dropped, moved or repeated."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from lamina.errors import ConfigError
from lamina.layers.block_moves import MOVES, Move, moved, order_of
from lamina.layers.selectors import ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

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
        ConfigError: If a layer that the reader reads is gone or its values have changed, or if the fusion has no
            setting for the layers that it reads.
    """
    config, depth = reader.config.fusion, before.depth
    places = {layer: layer for layer in range(before.layers)}
    for edit in edits:
        now_at = ((layer, _place(now, edit, before.name, stacks)) for layer, now in places.items())
        places = {layer: now for layer, now in now_at if now is not None}
    if depth in places and before.points[-1].module not in before.blocks:  # its state comes after a norm
        places[depth] = after.depth
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
    if config.needs_block_inputs or config.site != "output" or not known & {"layers", "layer"}:
        raise ConfigError(f"{_OP}: {reads}, and its fusion cannot read them under other numbers. {_HINT}")
    return replace(config, layers=now) if "layers" in known else replace(config, layer=now[0])


def _place(layer: int, edit: Move, stack: str, stacks: Collection[str]) -> int | None:
    """Return the number of the layer whose state after an edit equals the state of `layer` before it; None if unknown.

    `stack` is the name of the layer's stack, and `stacks` are the names of all stacks of the model.
    """
    is_same = edit.kind in _IN_PLACE or edit.settings.get("identity") is True
    if not is_same and edit.stack not in (*stacks, "all"):
        return None  # such as the convolutions below the first block
    if is_same or layer == 0:
        order = order_of(edit) if edit.stack == stack else None  # identity copies return what they receive
        return layer if order is None or layer == 0 else order.index(layer) + 1
    if edit.stack not in (stack, "all"):
        return None if stack == "decoder" else layer  # the states of a decoder depend on the encoder's
    order = order_of(edit)
    if order is None:  # weights of some blocks were changed or added: the states below the first of them stay
        return layer if layer < min(edit.layers, default=layer + 1) else None
    same = next((place for place, number in enumerate(order) if number != place + 1), len(order))
    return layer if layer <= same else None


def check_untrained(parameters: Mapping[str, Tensor], edits: Sequence[Move]) -> None:
    """Raise ConfigError if identity copies of blocks that `edits` added were trained, so that they change the states.

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
