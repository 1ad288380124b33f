"""`lamina cache`: what lies in the hidden-state cache, and clearing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from lamina.cli.options import JsonOption
from lamina.cli.output import print_json, print_table

if TYPE_CHECKING:
    from pathlib import Path

    from lamina.data.cache_files import Entry

_COLUMNS = ("key", "model", "rows", "layers", "dtype", "size", "age", "note")


def cache(
    clear: Annotated[
        str | None,
        typer.Option(
            "--clear", metavar="KEY", help='Remove an entry (the beginning of its key is enough), or "all" of them.'
        ),
    ] = None,
    cache_dir: Annotated[
        str | None,
        typer.Option("--cache-dir", help="Folder of the cache; by default $LAMINA_CACHE, or lamina in ~/.cache."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the hidden states that are kept on disk, or remove them.

    What a killed run left unfinished is removed by any --clear.
    """
    from lamina.data import cache_files as files

    folder = files.cache_folder(cache_dir)
    removed = None if clear is None else files.clear(folder, clear)
    shown = files.entries(folder) if removed is None else removed
    left = [path.name for path in files.unfinished(folder)]
    if as_json:
        what = "entries" if removed is None else "removed"
        print_json({"folder": str(folder), what: [_facts(entry) for entry in shown], "unfinished": left})
    elif removed is not None:
        print(f"{folder}: removed {_count(removed)}, {decimal(_bytes(removed))}")
    else:
        _show(folder, shown, left)


def _show(folder: Path, shown: list[Entry], left: list[str]) -> None:

    if shown:
        rows = [_row(entry) for entry in shown]
        print_table(f"{folder}: {_count(shown)}, {decimal(_bytes(shown))}", _COLUMNS, rows)
    else:
        print(f"{folder}: no entries")
    if left:
        print(f"{len(left)} unfinished, left by runs that were killed; --clear removes them")


def _count(found: list[Entry]) -> str:
    return "1 entry" if len(found) == 1 else f"{len(found)} entries"


def _bytes(found: list[Entry]) -> int:
    return sum(entry.size_bytes for entry in found)


def _facts(entry: Entry) -> dict[str, Any]:
    """One entry, JSON-ready."""
    names = ("model", "rows", "tokens", "layers", "dtype", "precision")
    known = {name: entry.facts.get(name) for name in names}
    return {
        "key": entry.key,
        **known,
        "size_bytes": entry.size_bytes,
        "age_s": entry.age_s,
        "problem": entry.problem,
    }


def _row(entry: Entry) -> tuple[object, ...]:
    from lamina.layers.selectors import ranges

    facts = entry.facts
    layers = "; ".join(f"{stack} {ranges(some)}" for stack, some in facts.get("layers", {}).items())
    return (
        entry.key,
        facts.get("model"),
        facts.get("rows"),
        layers,
        facts.get("dtype"),
        decimal(entry.size_bytes),
        age(entry.age_s),
        entry.problem,
    )


def age(seconds: float | None) -> str:
    """A time in its largest unit, such as 3 h."""
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"
