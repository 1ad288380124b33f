"""The JSON files of a saved folder: their names, and their fields. Fields are checked when a file is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from lamina.errors import StoreError, UnknownNameError, convert_errors
from lamina.store.files import damaged, read_json
from lamina.utils import JSONObject  # pydantic reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


FORMAT = 1
MANIFEST, CARD, READERS, BASE, PROCESSOR = "lamina.json", "README.md", "readers", "base", "processor"
READER, WEIGHTS, RECORD = "reader.json", "model.safetensors", "lamina_edits.json"


class SavedFacts(BaseModel):
    """Base class for the content of a JSON file. The file must have all fields of the class and no others.

    If the class has a field `format`, only files whose format equals `FORMAT` are read.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a JSON file, check its fields and return the object.

        Raises:
            StoreError: If the file is missing, is damaged or has an unknown format, or a field is missing or wrong.
            UnknownNameError: If there is an unknown key.
        """
        fields = read_json(path)
        if "format" in cls.model_fields and fields.get("format") != FORMAT:
            what = f"has format {fields.get('format')}; this version of lamina reads format {FORMAT}"
            raise StoreError(f"load: {path} {what}. Use the version that saved it, or a newer one.")
        with convert_errors(lambda reason: damaged(path, f"cannot be understood ({reason})")):
            return cls._checked(path, fields)

    @classmethod
    def _checked(cls, path: Path, fields: JSONObject) -> Self:
        """Return the object with the given fields of the file `path`; raise an error for the first invalid field.

        Raises:
            StoreError: If a field is missing or wrong.
            UnknownNameError: If there is an unknown key.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            problem = error.errors()[0]
        *parents, key = map(str, problem["loc"])
        where = ".".join([*parents, key])
        if problem["type"] == "extra_forbidden":
            holder = cls.holder(parents)
            known = [".".join([*parents, name]) for name in holder.model_fields]
            raise UnknownNameError(op=f"load: {path}", got=where, known=known, what="key")
        if problem["type"] == "missing":
            raise damaged(path, f"has no '{where}'")
        raise damaged(path, f"has {str(problem['input'])[:40]!r} as '{where}'; {problem['msg'].lower()}")

    @classmethod
    def holder(cls, parents: Sequence[str]) -> type[SavedFacts]:
        """Return the class that describes the nested object at the keys `parents` of a manifest, outermost key first.

        Without keys, it is this class.
        """
        return cls if not parents else {"base": BaseFacts, "processor": ProcessorFacts}.get(parents[-1], StackFacts)


class StackFacts(SavedFacts):
    """A manifest's entry about one stack of the base model.

    Attributes:
        layers: Number of layers, embeddings included.
        width: Size of a hidden state.
        fingerprint: Hash of the stack's weights. None: readers were trained on recorded states of unknown weights.
        config: Settings of the model's config that may change the stack's states; see `config_facts`. None in banks of
            earlier versions.
        modules: Classes and settings of the stack's modules, as digests; see `module_facts`. None in banks of earlier
            versions.
    """

    layers: int
    width: int
    fingerprint: str | None
    config: JSONObject | None = None
    modules: dict[str, str] | None = None


class BaseFacts(SavedFacts):
    """A manifest's entry about the base model of the readers.

    Attributes:
        id: Folder or hub id from which the model can be loaded; None if it was never saved in its present form.
        revision: Commit on the hub; None if the model did not come from there.
        model_type: The family, as in the model's config.
        dtype: Type of the model's weights, such as "float32".
        stacks: Stack name -> facts, for the stacks that the readers read.
        library: Versions of transformers and torch that saved the bank. If the installed versions differ,
            `StackFacts.modules` is not compared; of `StackFacts.config` only the settings that both versions have are
            compared. None in banks of earlier versions of lamina.
        trained: Whether the bank's folder contains the model, because it was trained with the readers. `id` is then
            where it came from before training.
        recorded: The recorded layers, if the readers were trained on recorded states; `id` and `model_type` may then be
            unknown. None: the readers were trained on the model itself.
        pooling: How the states of a row's tokens became one recorded state. None: there is a state per token.
    """

    id: str | None
    revision: str | None
    model_type: str
    dtype: str
    stacks: dict[str, StackFacts]
    library: str | None = None
    trained: bool = False
    recorded: list[int] | None = None
    pooling: Literal["first", "last", "mean"] | None = None


class ProcessorFacts(SavedFacts):
    """A manifest's entry about the tokenizer or processor that the readers were trained with.

    Attributes:
        files: The processor's files in the bank's folder; empty if they are saved with the base model, or it cannot be
            saved.
        facts: Everything on which the processor's outputs depend; see `processor_facts`.
    """

    files: list[str]
    facts: JSONObject


class Manifest(SavedFacts):
    """The content of `lamina.json`, the manifest of a bank.

    Attributes:
        format: Version of the format, `FORMAT`.
        lamina: Version of lamina that wrote it.
        base: The base model.
        info: The bank's `info`.
        readers: Names of the readers; each has a folder.
        processor: The bank's processor; None if it has none, or an earlier version saved the bank.
    """

    format: int
    lamina: str
    base: BaseFacts
    info: JSONObject
    readers: list[str]
    processor: ProcessorFacts | None = None


class ReaderFacts(SavedFacts):
    """The content of `reader.json`: the settings of one reader.

    Attributes:
        fusion: Fields of the fusion's config, with its registered name as "name".
        head: Fields of the head's config, with its registered name as "name".
        stack: Name of the stack that the reader reads.
        seed: The reader's seed.
        layers: Layers that the reader reads.
        parameters: Number of the reader's parameters.
        info: The reader's `info`.
        borrowed: Fingerprint of the base model's tensors that the head uses; None if it uses none.
    """

    fusion: JSONObject
    head: JSONObject
    stack: str
    seed: int
    layers: list[int]
    parameters: int
    info: JSONObject
    borrowed: str | None = None


class EditsRecord(SavedFacts):
    """The content of `lamina_edits.json`: `lamina.save` writes it beside a model.

    Attributes:
        format: Version of the format, `FORMAT`.
        architecture: Class of the saved model.
        edits: The edits of the model, oldest first.
        files: All files that were written with it; empty in folders of versions before 0.2.
    """

    format: int
    architecture: str
    edits: list[JSONObject]
    files: list[str] = []


def library_versions() -> str:
    """Return the versions of transformers and torch, because attributes of modules depend on them."""
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
