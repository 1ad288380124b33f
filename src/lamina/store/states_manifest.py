"""`states.json` describes files of hidden states: their layers, their shapes, and the model that computed them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from pydantic import Field

from lamina.errors import StoreError
from lamina.layers.recorded import RecordedFacts, StatesPooling
from lamina.store.manifest import SavedFacts
from lamina.utils import is_dir

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

STATES = "states.json"
StatesAxis: TypeAlias = Literal["rows", "tokens", "layers", "width"]


class StatesArray(SavedFacts):
    """One tensor in a file. It holds the states of rows of the data, one row after the other.

    Attributes:
        file: The file, relative to the manifest: `.npy`, `.safetensors` or `.parquet`.
        tensor: Name of the tensor in a safetensors file, or of the column in a Parquet file. None for `.npy`.
        axes: The name of each axis. Without "rows", the tokens of all rows follow one another, or there is one row.
            Without "layers", there is one layer. Without "tokens", rows are pooled.
        shape: Size of each axis. For a Parquet file the number of rows comes first, then a list per token or layer.
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

    @classmethod
    def holder(cls, parents: Sequence[str]) -> type[SavedFacts]:
        """Return the class that describes the nested object at the keys `parents`, or this class without keys."""
        return StatesArray if parents else cls

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
        return RecordedFacts(**own | {"layers": tuple(self.layers)})
