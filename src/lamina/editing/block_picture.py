"""Show which blocks a stack has after edits, and from which earlier block each one comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from lamina.layers.block_moves import order_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.editing.record import Edit

_SIGNS = {"insert": "i", "reinit": "r", "freeze": "f"}
_LEGEND = {
    "+": "a copy",
    "=": "a copy that starts as an identity",
    "i": "has inserted layers",
    "r": "re-initialised",
    "f": "frozen",
}


class BlockFacts(TypedDict):
    """A block of an edited stack.

    Attributes:
        block: Its number now, from 1.
        was: Its number before the edits, from 1. For a copy, the number of the original.
        copy: Whether it is a copy.
        identity: Whether it is a copy that computed the identity at first.
        edits: Kinds of the edits inside it, each once: "freeze", "reinit", and "insert" unless it was merged.
    """

    block: int
    was: int
    copy: bool
    identity: bool
    edits: list[str]


class StackPicture(TypedDict):
    """The blocks of a stack before and after its edits.

    Attributes:
        before: Number of blocks before.
        after: Facts of each block after, lowest first.
        gone: The removed blocks' numbers before the edits, from 1.
    """

    before: int
    after: list[BlockFacts]
    gone: list[int]


def stack_pictures(edits: Sequence[Edit], depths: Mapping[str, int]) -> dict[str, StackPicture]:
    """Return stack name -> the stack's blocks before and after edits, to show them. Stacks without edits are left out.

    Args:
        edits: The edits, oldest first.
        depths: Name of each stack -> its number of blocks after the edits.
    """
    pictures: dict[str, StackPicture] = {}
    for name, depth in depths.items():
        own = [edit for edit in edits if edit.stack in (name, "all")]
        moves = [(edit, order) for edit in own if (order := order_of(edit)) is not None]
        before = max([*moves[0][0].layers, *moves[0][1]]) if moves else depth
        if own:
            after = _after(own, before)
            gone = sorted(set(range(1, before + 1)) - {block["was"] for block in after})
            pictures[name] = StackPicture(before=before, after=after, gone=gone)
    return pictures


def _after(edits: Sequence[Edit], before: int) -> list[BlockFacts]:
    """Return a stack's blocks after its edits; `before` is the number of blocks that it had before them."""
    numbers = range(1, before + 1)
    blocks = [BlockFacts(block=number, was=number, copy=False, identity=False, edits=[]) for number in numbers]
    for edit in edits:
        order = order_of(edit)
        if order is not None:
            old, blocks = blocks, []
            for place, layer in enumerate(order):
                source = old[layer - 1]
                again = layer in order[:place]
                copy = again or source["copy"]
                identity = (again and edit.settings.get("identity") is True) or source["identity"]
                kinds = list(source["edits"])
                blocks.append({**source, "block": place + 1, "copy": copy, "identity": identity, "edits": kinds})
            continue
        for block in blocks:
            if edit.kind == "merge":
                block["edits"] = [kind for kind in block["edits"] if kind != "insert"]
            elif block["block"] in edit.layers and edit.kind not in block["edits"]:
                block["edits"].append(edit.kind)
    return blocks


def drawn(picture: StackPicture) -> list[str]:
    """Return a picture as two lines of text: the blocks before and after; each block after has its number before.

    A third line, if needed, explains the signs in the second and lists the removed blocks.
    """
    signs: dict[str, None] = {}
    boxes: list[str] = []
    for block in picture["after"]:
        marks = "=" if block["identity"] else "+" if block["copy"] else ""
        marks += "".join(_SIGNS[kind] for kind in block["edits"] if kind in _SIGNS)
        signs |= dict.fromkeys(marks)
        boxes.append(f"[{block['was']}{marks}]")
    lines = ["before  " + "".join(f"[{number}]" for number in range(1, picture["before"] + 1))]
    lines.append("after   " + "".join(boxes))
    notes = [f"{sign} {_LEGEND[sign]}" for sign in _LEGEND if sign in signs]
    notes += [f"gone: {', '.join(map(str, picture['gone']))}"] if picture["gone"] else []
    return [*lines, *([f"        {'; '.join(notes)}"] if notes else [])]
