"""`lamina cache`: list the entries of the hidden-state cache, or remove them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rich.filesize import decimal
from typer import Option

from lamina.cli.shared_options import JsonOption, print_json, print_table

if TYPE_CHECKING:
    from lamina.data.disk_cache import Entry
    from lamina.utils import Row

_CLEAR = 'Remove the entry with this key (its beginning is enough), or "all". Default: list the entries.'
_FOLDER = "Folder of the cache. Default: $LAMINA_CACHE, or lamina in ~/.cache."
_COLUMNS = ("key", "model", "rows", "layers", "dtype", "size", "age", "note")
_FACTS = ("model", "rows", "tokens", "layers", "dtype", "precision")


def cache(
    clear: Annotated[str | None, Option(metavar="KEY", help=_CLEAR)] = None,
    cache_dir: Annotated[str | None, Option(help=_FOLDER)] = None,
    as_json: JsonOption = False,
) -> None:
    """List the hidden states that are cached on disk, or remove them.

    Training with the option `cache` stores the states of a frozen model, so that later epochs and runs need not compute
    them again. Every --clear also removes unfinished files that killed runs left behind. Wrong input ends with one
    sentence and exit code 2.
    """
    from lamina.data import disk_cache

    folder = disk_cache.cache_folder(cache_dir)
    entries = disk_cache.entries(folder) if clear is None else disk_cache.clear(folder, clear)
    unfinished = [path.name for path in disk_cache.unfinished(folder)]
    count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
    total = f"{count}, {decimal(sum(entry.size_bytes for entry in entries))}"
    if as_json:
        key = "entries" if clear is None else "removed"
        print_json({"folder": str(folder), key: [_facts(entry) for entry in entries], "unfinished": unfinished})
    elif clear is not None:
        print(f"{folder}: removed {total}")
    else:
        if entries:
            print_table(f"{folder}: {total}", _COLUMNS, [_row(entry) for entry in entries])
        else:
            print(f"{folder}: no entries")
        if unfinished:
            print(f"{len(unfinished)} unfinished files were left by killed runs; --clear removes them")


def _facts(entry: Entry) -> Row:
    contents = {name: entry.facts.get(name) for name in _FACTS}
    state = {"size_bytes": entry.size_bytes, "age_s": entry.age_s, "problem": entry.problem}
    return {"key": entry.key, **contents, **state}


def _row(entry: Entry) -> tuple[object, ...]:
    from lamina.layers.selectors import ranges

    model, rows, layers, dtype = (entry.facts.get(name) for name in ("model", "rows", "layers", "dtype"))
    cached = "; ".join(f"{stack} {ranges(numbers)}" for stack, numbers in (layers or {}).items())
    return (entry.key, model, rows, cached, dtype, decimal(entry.size_bytes), age(entry.age_s), entry.problem)


def age(seconds: float | None) -> str:
    """Return a duration in its largest whole unit, such as "3 h" for 12,000 seconds; "" for None."""
    if seconds is None:
        return ""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    unit, size = next(((unit, size) for unit, size in units if seconds >= size), units[-1])
    return f"{int(seconds // size)} {unit}"
