"""The JSON files of a saved folder: their names, and their fields. Fields are checked when a file is read."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lamina.errors import StoreError, UnknownNameError, convert_errors
from lamina.layers.recorded import RecordedFacts, StatesPooling
from lamina.store.files import damaged, read_json
from lamina.utils import (
    JSONObject,  # pydantic reads the annotations
    is_dir,
)

if TYPE_CHECKING:
    from os import PathLike

FORMAT = 1
MANIFEST, CARD, READERS, BASE, PROCESSOR = "lamina.json", "README.md", "readers", "base", "processor"
READER, WEIGHTS, RECORD = "reader.json", "model.safetensors", "lamina_edits.json"


class SavedFacts(BaseModel):
    """Base class for the content of a JSON file. A file must have all fields without a default, and no unknown ones.

    Values must have the right types; none is converted. Instances cannot be changed. If the class has a field `format`,
    only files whose format equals `FORMAT` are read.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def check_keys(cls, fields: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Return the object that `handler`, pydantic's own validation, makes of `fields`; then refuse unknown keys.

        Raises pydantic's errors: first for a missing or wrong field, then, as "unknown_key", for an unknown key.
        """
        facts = handler(fields)
        keys = list(cast("JSONObject", fields)) if isinstance(fields, dict) else []
        if unknown := [key for key in keys if key not in cls.model_fields]:
            raise PydanticCustomError("unknown_key", "unknown", {"key": unknown[0], "known": list(cls.model_fields)})
        return facts

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
        """Return the object with the given fields of the file `path`; the errors are those of `read`."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            problem = error.errors()[0]
        where, context = ".".join(map(str, problem["loc"])), problem.get("ctx", {})
        if problem["type"] == "unknown_key":
            key, *known = (f"{where}.{name}" if where else name for name in (context["key"], *context["known"]))
            raise UnknownNameError(op=f"load: {path}", got=key, known=known, what="key")
        if problem["type"] == "missing":
            raise damaged(path, f"has no '{where}'")
        raise damaged(path, f"has {str(problem['input'])[:40]!r} as '{where}'; {problem['msg'].lower()}")


class StackFacts(SavedFacts):
    """A manifest's entry about one stack of the base model.

    Attributes:
        layers: Number of layers, embeddings included.
        width: Size of a hidden state.
        fingerprint: Hash of the stack's weights. None: readers were trained on recorded states of unknown weights.
        config: Settings of the model's config that may change the stack's states; see `StackSettings`. None in banks of
            earlier versions or on recorded states.
        modules: Classes and settings of the stack's modules, as digests; see `StackSettings`. None as for `config`.
    """

    layers: int
    width: int
    fingerprint: str | None
    config: JSONObject | None = None
    modules: dict[str, str] | None = None


class BaseFacts(SavedFacts):
    """A manifest's entry about the base model of the readers.

    Attributes:
        id: Folder or hub id from which the model can be loaded. None if there is none, or if Lamina has edited (except
            by `freeze_`) or trained the model and not saved it since.
        revision: Commit on the hub; None if the model did not come from there.
        model_type: The family, as in the model's config.
        dtype: Type of the model's weights, such as "float32".
        stacks: Stack name -> facts, for the stacks that the readers read; for all stacks in a bank without readers.
        library: Versions of transformers and torch that saved the bank. If the installed versions differ,
            `StackFacts.modules` is not compared; of `StackFacts.config` only the settings that both versions have are
            compared. None in banks of earlier versions of lamina.
        trained: Whether the bank's folder contains the model (`saves_base`). `id` is then where it was loaded from,
            even if it was changed since.
        recorded: The recorded layers, if the readers were trained on recorded states. An unknown `id` is then None, and
            an unknown `model_type` "". None: the readers were trained on the model itself.
        adapters: Names of the adapters (PEFT) that were active in the model. They are only for messages. None
            in banks of earlier versions or on recorded states.
        pooling: How the states of a row's tokens became one recorded state. None: there is a state per token, or
            `recorded` is None.
    """

    id: str | None
    revision: str | None
    model_type: str
    dtype: str
    stacks: dict[str, StackFacts]
    library: str | None = None
    trained: bool = False
    recorded: list[int] | None = None
    adapters: list[str] | None = None
    pooling: StatesPooling | None = None

    @classmethod
    def of_recorded(cls, facts: RecordedFacts) -> Self:
        """Return the entry about a model of which only recorded states are known."""
        stack = StackFacts(layers=facts.depth + 1, width=facts.width, fingerprint=facts.fingerprint)
        return cls(
            id=facts.model,
            revision=None,
            model_type=facts.model_type or "",
            dtype="float32",
            stacks={facts.stack: stack},
            library=library_versions(),
            recorded=list(facts.layers),
            pooling=facts.pooling,
        )

    @property
    def recorded_facts(self) -> RecordedFacts:
        """The facts about the model that `of_recorded` got; only for an entry about recorded states."""
        name, stack = next(iter(self.stacks.items()))
        return RecordedFacts(
            stack=name,
            depth=stack.layers - 1,
            width=stack.width,
            layers=tuple(self.recorded or ()),
            pooling=self.pooling,
            model=self.id,
            model_type=self.model_type or None,
            fingerprint=stack.fingerprint,
        )


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
        seed: Seed of the reader's initial parameters and of dropout.
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
        files: All files of the model in the folder; empty in folders of versions before 0.2.
    """

    format: int
    architecture: str
    edits: list[JSONObject]
    files: list[str] = []


def library_versions() -> str:
    """Return the versions of transformers and torch as one text."""
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"


STATES = "states.json"
StatesAxis: TypeAlias = Literal["rows", "tokens", "layers", "width"]


class StatesArray(SavedFacts):
    """One tensor in a file. It holds the states of rows of the data, one row after the other.

    Attributes:
        file: The file, relative to the manifest: `.npy`, `.safetensors` or `.parquet`.
        tensor: Name of the tensor in a safetensors file, or of the column in a Parquet file. None for `.npy`.
        axes: The name of each axis. Without "rows", the tokens of all rows follow one another, or there is one row.
            Without "layers", there is one layer. Without "tokens", rows are pooled.
        shape: Size of each axis. For a Parquet file: the number of rows, then the lengths of a cell's nested lists,
            outermost first.
        rows: Number of rows in the tensor.
        layers: Layers of the tensor, in the order of its axis "layers". None: the manifest's layers.
        mask: Name of a tensor of the same safetensors file, or another `.npy` file, `[rows, tokens]`: 1 at tokens, 0 at
            padding. None: padding is on the right, as the lengths say.
    """

    file: str
    axes: list[StatesAxis]
    shape: list[int]
    rows: int = Field(ge=1)
    tensor: str | None = None
    layers: list[int] | None = None
    mask: str | None = None


class StatesManifest(SavedFacts):
    """The content of `states.json`.

    Attributes:
        format: Version of the format.
        rows: Number of rows.
        depth: Number of blocks of the stack; layers are 0 (the embeddings) to `depth`.
        width: Size of a hidden state.
        layers: Layers in the files, ascending.
        arrays: The tensors. If several hold states of one layer, they come in the order of the rows.
        lengths: File `.npy` with the number of tokens of each row. None: the arrays show it.
        pooling: How the states of a row's tokens became one: "first", "last" or "mean". None: every token has a state.
        stack: Name of the stack.
        model: Hub id or folder of the model. None: unknown.
        model_type: Family of the model, as in its config. None: unknown.
        fingerprint: Fingerprint of the stack's weights, from `lamina.store.fingerprint`. None: unknown.
        max_length: Maximum tokens per row when the states were computed. None: unknown.
        table: File with the labels, one row for each row of states. None: there is none.
        pairs: Whether each row is a pair of texts. None: unknown.
        add_prefix_space: Whether each text got a space before its first word, as by the option of `fit`. None: unknown.
    """

    format: int = 1
    rows: int = Field(ge=1)
    depth: int = Field(ge=1)
    width: int = Field(ge=1)
    layers: list[int]
    arrays: list[StatesArray]
    lengths: str | None = None
    pooling: StatesPooling | None = None
    stack: str = "main"
    model: str | None = None
    model_type: str | None = None
    fingerprint: str | None = None
    max_length: int | None = Field(default=None, ge=1)
    table: str | None = None
    pairs: bool | None = None
    add_prefix_space: bool | None = None

    @classmethod
    def of_folder(cls, folder: str | PathLike[str]) -> Self:
        """Read and check the manifest in a folder.

        Raises StoreError if it is missing, damaged or contradicts itself, and UnknownNameError if it has an unknown
        key.
        """
        path = Path(folder) / STATES
        if not is_dir(Path(folder)) or not path.is_file():
            hint = "`lamina extract` writes one, and lamina.data.describe_states describes files of other programs"
            raise StoreError(f"states: {folder} has no {STATES}; the manifest says what the files hold. {hint}.")
        manifest = cls.read(path)
        if problem := manifest.problem():
            raise StoreError(f"states: {path} {problem}. Correct it, or describe the files again.")
        return manifest

    def problem(self) -> str | None:
        """Return how the manifest contradicts itself, as the end of a sentence; None if it does not."""
        if not self.layers or self.layers != sorted({*self.layers}) or not 0 <= self.layers[0] <= self.layers[-1]:
            return f"has the layers {self.layers}; they must ascend"
        if self.layers[-1] > self.depth:
            return f"has a layer {self.layers[-1]} of a model of depth {self.depth}, whose last layer is {self.depth}"
        for array in self.arrays:
            if problem := self._array_problem(array):
                return f"has an entry for '{array.file}' with {problem}"
        for layer in self.layers:
            rows = sum(array.rows for array in self.arrays if layer in (array.layers or self.layers))
            if rows != self.rows:
                return f"has arrays with {rows} rows of layer {layer}, but 'rows' is {self.rows}"
        return None

    def _array_problem(self, array: StatesArray) -> str | None:
        """Return what is wrong with an array's axes, layers, width or rows, as the end of a sentence.

        None if nothing is.
        """
        names, layers = array.axes, array.layers or self.layers
        if len(set(names)) < len(names) or "width" not in names or len(array.shape) != len(names):
            return f"the axes {names} for the shape {array.shape}; each axis has one name, and one of them is 'width'"
        sizes = dict(zip(names, array.shape, strict=True))
        if not {*layers} <= {*self.layers} or sizes.get("layers", 1) != len(layers):
            return f"{sizes.get('layers', 1)} layers in its shape for the layers {layers}"
        if sizes["width"] != self.width:
            return f"the width {sizes['width']}, but 'width' is {self.width}"
        if sizes.get("rows", array.rows) != array.rows:
            return f"{sizes['rows']} rows in its shape, but 'rows' is {array.rows}"
        if ("tokens" in names) == (self.pooling is not None):
            return f"the axes {names} for the pooling {self.pooling}; pooled states have no 'tokens', others do"
        if not {"rows", "tokens"} & {*names} and array.rows > 1:
            return f"the axes {names} for {array.rows} rows; 'rows' or 'tokens' is one of them"
        return None

    @property
    def facts(self) -> RecordedFacts:
        """The facts about the model that the manifest holds."""
        own = {field.name: getattr(self, field.name) for field in fields(RecordedFacts)}
        own["layers"] = tuple(self.layers)
        return RecordedFacts(**own)
