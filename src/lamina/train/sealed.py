"""JSON that knows which run it is of, and in which any change is noticed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import xxhash

from lamina.errors import StoreError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lamina.train.identity import Facts

FORMAT = 2  # of the file and of what is in it; a checkpoint of version 0.1 had another


def seal(run: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """What a run has come to, as JSON with the run that it is of, and a checksum."""
    content = json.dumps([run, state], default=str)
    return f'{{"format": {FORMAT}, "checksum": "{xxhash.xxh3_128_hexdigest(content.encode())}", "content": {content}}}'


def unseal(path: Path) -> tuple[dict[str, Facts], dict[str, Any]]:
    """The run and the state that `seal` wrote; a StoreError, in short, if the file is damaged or of another version."""
    try:
        fields = json.loads(path.read_bytes())
        fields = fields if isinstance(fields, dict) else {}
        checksum = xxhash.xxh3_128_hexdigest(json.dumps(fields.get("content")).encode())
    except OSError as error:
        raise StoreError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path.name} is no JSON: {first_line(error)}") from error
    if (version := fields.get("format")) != FORMAT:
        what = f"format {str(version)[:40]}; this version of lamina reads format {FORMAT}"
        raise StoreError(f"{path.name} is damaged or was written by another version of lamina, in {what}")
    if fields.get("checksum") != checksum:
        raise StoreError(f"{path.name} holds something else than was saved; its checksum differs")
    return tuple(fields["content"])  # pyright: ignore[reportReturnType]
