"""What the JSON files of a saved folder hold, checked key by key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from lamina.errors import StoreError, UnknownNameError, convert_errors
from lamina.store.files import damaged, read_json

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
MANIFEST, CARD, READERS, BASE = "lamina.json", "README.md", "readers", "base"
READER, WEIGHTS, RECORD = "reader.json", "model.safetensors", "lamina_edits.json"


class SavedFacts(BaseModel):
    """Fields of a JSON file, none missing and no other; those with a `format` are read in this version's only."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a JSON file and check its fields: a StoreError, or for an unknown key UnknownNameError."""
        fields = read_json(path)
        if "format" in cls.model_fields and fields.get("format") != FORMAT:
            what = f"has format {fields.get('format')}; this version of lamina reads format {FORMAT}"
            raise StoreError(f"load: {path} {what}. Use the version that saved it, or a newer one.")
        with convert_errors(lambda reason: damaged(path, f"cannot be understood ({reason})")):
            return cls._checked(path, fields)

    @classmethod
    def _checked(cls, path: Path, fields: dict[str, Any]) -> Self:
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            problem = error.errors()[0]
        *parents, key = map(str, problem["loc"])
        where = ".".join([*parents, key])
        if problem["type"] == "extra_forbidden":
            holder = cls if not parents else BaseFacts if parents == ["base"] else StackFacts
            known = [".".join([*parents, name]) for name in holder.model_fields]
            raise UnknownNameError(op=f"load: {path}", got=where, known=known, what="key")
        if problem["type"] == "missing":
            raise damaged(path, f"has no '{where}'")
        raise damaged(path, f"has {str(problem['input'])[:40]!r} as '{where}'; {problem['msg'].lower()}")


class StackFacts(SavedFacts):
    """One stack of the base."""

    layers: int
    width: int
    fingerprint: str  # of its weights


class BaseFacts(SavedFacts):
    """The base that the readers were trained on."""

    id: str | None  # None for a model that was never saved
    revision: str | None
    model_type: str
    dtype: str
    stacks: dict[str, StackFacts]
    trained: bool = False  # along with the readers: the folder carries it, and `id` is what it was before


class Manifest(SavedFacts):
    """`lamina.json`: the base, facts about the bank, and the names of its readers."""

    format: int
    lamina: str
    base: BaseFacts
    info: dict[str, Any]
    readers: list[str]


class ReaderFacts(SavedFacts):
    """`reader.json`: what to build, where it attaches, and facts about its training."""

    fusion: dict[str, Any]
    head: dict[str, Any]
    stack: str
    seed: int
    layers: list[int]
    parameters: int
    info: dict[str, Any]
    borrowed: str | None = None  # fingerprint of what the head uses of the base besides its states


class EditsRecord(SavedFacts):
    """`lamina_edits.json`: the class of the model that was saved, and its edits."""

    format: int
    architecture: str
    edits: list[dict[str, Any]]
    files: list[str] = []  # all that was written with it; versions before 0.2 did not say
