"""Follow blocks and their parameters through edits that drop, move or repeat blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

MOVES = ("keep", "drop", "duplicate")  # edits that give blocks other numbers; their settings have the new order


class Move(Protocol):
    """The attributes of an `editing.record.Edit` that this module uses; see there."""

    @property
    def kind(self) -> str:
        """Name of the kind of edit, such as "truncate" or one of `MOVES`."""
        ...

    @property
    def stack(self) -> str:
        """Name of the stack that was changed."""
        ...

    @property
    def layers(self) -> Sequence[int]:
        """Numbers of the edited layers; for "truncate", "keep" and "drop", the layers that were removed."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """The arguments of the edit.

        For a kind in `MOVES` they include the blocks' new "order"; "path", which says where the list of blocks is (None
        if one block serves as all layers); and in some families "first", see `names_after`.
        """
        ...


def order_of(edit: Move) -> list[int] | None:
    """Return the blocks of a stack after an edit, as their numbers (from 1) before it.

    A number that occurs twice stands for a block and its copy. None if the edit is neither in `MOVES` nor "truncate".
    """
    if edit.kind == "truncate":
        return list(range(1, min(edit.layers, default=1)))
    return list(edit.settings["order"]) if edit.kind in MOVES else None


def name_then(made: Sequence[Move], number: int, name: str) -> str:
    """Return the name that a parameter, now called `name`, had right after the edit `made[number]`.

    `made` has all edits of the model. For a copy, the result is the name of the parameter that was copied.
    """
    for later in reversed(made[number + 1 :]):
        path, order = later.settings.get("path"), order_of(later)
        if path and order and name.startswith(f"{path}."):
            place, _, rest = name.removeprefix(f"{path}.").partition(".")
            if place.isdecimal() and not is_first(rest, later.settings.get("first", ())):
                name = f"{path}.{order[int(place)] - 1}.{rest}"
    return name


def moved(name: str, edit: Move) -> list[str]:
    """Return a parameter's names after an edit in `MOVES`: several if its block was copied, [] if it was dropped.

    If the edit has no path of blocks, the name stays.
    """
    path = edit.settings["path"]
    return [name] if path is None else names_after(name, path, edit.settings["order"], edit.settings.get("first", ()))


def names_after(name: str, path: str, order: Sequence[int], first: Sequence[str] = ()) -> list[str]:
    """Return the new names of a parameter after the blocks at `path` were put in the order `order`.

    `order` has the blocks' old numbers, from 1. There are several names if the parameter's block was copied, and none
    if the block was dropped. A parameter outside these blocks keeps its name. The parts `first` (paths
    relative to a block, perhaps with wildcards) exist in the first block only; their parameters stay there, whatever
    `order` says.
    """
    if not name.startswith(f"{path}."):
        return [name]
    place, _, rest = name.removeprefix(f"{path}.").partition(".")
    if not place.isdecimal():
        return [name]
    if is_first(rest, first):
        return [f"{path}.0.{rest}"]
    return [f"{path}.{new}.{rest}" for new, layer in enumerate(order) if layer == int(place) + 1]


def is_first(name: str, first: Iterable[str]) -> bool:
    """Return whether a path relative to a block lies in one of the paths `first`. These may contain wildcards."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in first)
