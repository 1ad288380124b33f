"""What the JSON files of a saved bank hold, checked key by key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from lamina.errors import StoreError, UnknownNameError
from lamina.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT = 1
MANIFEST, CARD, READERS, BASE = "lamina.json", "README.md", "readers", "base"
READER, WEIGHTS = "reader.json", "model.safetensors"


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StackFacts(_Facts):
    """One stack of the base: how many layers, how wide, and the fingerprint of its weights."""

    layers: int
    width: int
    fingerprint: str


class BaseFacts(_Facts):
    """The base that the readers were trained on; `id` is None for a model that was never saved.

    Where it was `trained` along with the readers, the folder carries it, and `id` is what it was before.
    """

    id: str | None
    revision: str | None
    model_type: str
    dtype: str
    stacks: dict[str, StackFacts]
    trained: bool = False


class Manifest(_Facts):
    """`lamina.json`: the base, facts about the bank, and the names of its readers."""

    format: int
    lamina: str
    base: BaseFacts
    info: dict[str, Any]
    readers: list[str]


class ReaderFacts(_Facts):
    """`reader.json`: what to build, where it attaches, and facts about its training.

    `borrowed` is the fingerprint of what the head uses of the base besides its states, or None.
    """

    fusion: dict[str, Any]
    head: dict[str, Any]
    stack: str
    seed: int
    layers: list[int]
    parameters: int
    info: dict[str, Any]
    borrowed: str | None = None


Facts = TypeVar("Facts", bound=_Facts)


def read_manifest(folder: Path) -> Manifest:
    """Read `lamina.json`.

    Raises:
        StoreError: If it is missing, damaged, or of a format this version does not read.
        UnknownNameError: If it holds a key that this format does not have.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise StoreError(
            f"load: {folder} has no {MANIFEST}; that file makes a folder a bank. "
            "Give a folder that save_pretrained wrote, or save the bank again."
        )
    fields = read_json(path)
    if fields.get("format") != FORMAT:
        raise StoreError(
            f"load: {path} has format {fields.get('format')}; this version of lamina reads format {FORMAT}. "
            "Use the version that saved the bank, or a newer one."
        )
    return parse(Manifest, fields, path)


def parse(kind: type[Facts], fields: Mapping[str, Any], path: Path) -> Facts:
    """Check the fields of a file.

    Raises:
        StoreError: If one is missing or of the wrong type.
        UnknownNameError: If there is one too many.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _translated(kind, error, path) from None


def _translated(kind: type[_Facts], error: ValidationError, path: Path) -> StoreError | UnknownNameError:
    problem = error.errors()[0]
    *parents, key = map(str, problem["loc"])
    where = ".".join([*parents, key])
    if problem["type"] == "extra_forbidden":
        return UnknownNameError(op=f"load: {path}", got=where, known=_known(kind, parents), what="key")
    if problem["type"] == "missing":
        return StoreError(f"load: {path} has no '{where}'; the file is incomplete. Copy or save it again.")
    return StoreError(
        f"load: {path} has {str(problem['input'])[:40]!r} as '{where}'; {problem['msg'].lower()}. "
        "Copy or save it again."
    )


def _known(kind: type[_Facts], parents: list[str]) -> list[str]:
    """The keys there are at the place where one was too many."""
    inner = kind if not parents else BaseFacts if parents == ["base"] else StackFacts
    return [".".join([*parents, name]) for name in inner.model_fields]
