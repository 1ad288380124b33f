"""Export a bank with a quantised base model, and measure the effect on every task's score."""

from __future__ import annotations

import hashlib
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from lamina.errors import ConfigError, StoreError, UnsupportedModelError, first_line, require_packages
from lamina.prediction.backends import engine_in_use
from lamina.prediction.evaluate import evaluate
from lamina.store.files import staged, write_json
from lamina.store.onnx import GRAPH, MARK, WEIGHTS, Int8Score, OnnxFacts, export_onnx, exported_files, hash_of_graph
from lamina.store.onnx_engine import OnnxEngine
from lamina.tasks.metrics import LOWER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike
    from onnx import ModelProto, NodeProto, TensorProto

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task

_OP = "export"
_RUNTIME = "com.microsoft"  # the domain of ONNX Runtime's own operators


def export_int8(
    bank: ReaderBank,
    folder: str | Path,
    tasks: Mapping[str, Task] | str | Path,
    *,
    max_loss: float = 0.01,
    progress: bool = False,
    **columns: Any,  # noqa: ANN401
) -> OnnxFacts:
    """Export a bank as one ONNX graph whose base model multiplies matrices in int8; the readers stay in float32.

    The weights of the base model's linear maps are quantised once, with a scale per output. Their inputs are quantised
    in each pass, with a scale per token, so that answers do not depend on the other texts of a batch. Every task is
    scored on its validation rows, in PyTorch before the export and with the graph after it.

    Args:
        bank: The bank, on the CPU. It is not changed.
        folder: Folder to write, as in `export_onnx`.
        tasks: Reader name -> task, for all readers; or a labelled file, as in `evaluate`.
        max_loss: Largest accepted loss: by how much a task's first metric may be worse in int8 than in float32.
        progress: Show progress bars.
        **columns: Columns of the file: `text`, `text_pair`, `labels` and `positive` of `evaluate`.

    Returns:
        The contents of `onnx.json`; `int8` has both scores of every task.

    Raises:
        StoreError: If a task loses more than `max_loss`, or the folder cannot be written; nothing is then written.
        ConfigError: If a reader has no task, or the bank is not on the CPU.
        UnsupportedModelError: If the bank cannot be exported, or the base has no linear map to quantise.
        MissingExtraError: If onnx, onnxscript or onnxruntime is not installed.
        LaminaError: Any other error of `evaluate` or `export_onnx`.
    """
    require_packages(_OP, "onnx", "onnx", "onnxscript", "onnxruntime")
    if bank.device.type != "cpu":
        raise ConfigError(f"{_OP}: the bank is on {bank.device}; int8 graphs are for CPUs. Load it on the CPU.")
    folder = Path(folder)
    # rows that cannot be read end the export before its long work
    exact = evaluate(bank, tasks, progress=progress, **columns)
    if missing := [name for name in bank if name not in exact]:
        raise ConfigError(f"{_OP}: reader '{missing[0]}' has no validation rows; every reader is scored in int8.")
    with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        plain, stage = Path(temporary, "float32"), Path(temporary, "int8")
        facts = export_onnx(bank, plain, progress=progress)
        stage.mkdir()
        _quantise(bank, plain / GRAPH, stage / GRAPH)
        facts = facts.model_copy(update={"sha256": hash_of_graph(stage), "int8": {}})
        write_json(stage / MARK, facts.model_dump())
        with engine_in_use(bank, "int8", OnnxEngine.open(bank, stage, quantised=True)):
            quantised = evaluate(bank, tasks, backend="int8", progress=progress, **columns)
        scores: dict[str, Int8Score] = {}
        for name, own in exact.items():
            metric = next(iter(own))
            before, after = float(own[metric]), float(quantised[name][metric])
            loss = (after - before) * (1 if metric in LOWER else -1)
            if not loss <= max_loss:
                lost = f"'{name}' has a {metric} of {after:.4f} in int8 and {before:.4f} in float32"
                raise StoreError(f"{_OP}: {lost}; at most {max_loss} may be lost. Nothing was written.")
            scores[name] = Int8Score(metric=metric, float32=before, int8=after)
        others = [name for name in facts.files if name not in (GRAPH, WEIGHTS, MARK)]
        facts = facts.model_copy(update={"int8": scores, "files": sorted([GRAPH, *others])})
        with staged(folder, [MARK, GRAPH, WEIGHTS], exported_files(folder)) as target:
            for name, source in {GRAPH: stage, **dict.fromkeys(others, plain)}.items():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_bytes((source / name).read_bytes())
            write_json(target / MARK, facts.model_dump())
    return facts


def _quantise(bank: ReaderBank, source: Path, target: Path) -> None:
    """Quantise the base's matrix products with weights in the graph file `source`, and write the graph to `target`.

    onnxruntime's own `quantize_dynamic` has one scale for all tokens of a batch, so that answers depend on the texts
    that are read together. Raises UnsupportedModelError if the base has no linear map, or the graph cannot be written.
    """
    onnx = import_module("onnx")
    model = onnx.load(str(source))
    model_type, hint = str(bank.model.config.model_type), "Export it without int8."
    unsupported = partial(UnsupportedModelError, op=_OP, model_type=model_type, hint=hint)
    chosen = set(_nodes_of_base(bank, model))
    if not chosen:
        raise unsupported(reason="it has no linear map to quantise")
    graph = _Int8Graph(model)
    for node in model.graph.node:
        graph.add(node, quantised=node.name in chosen)
    graph.replace()
    try:
        onnx.save(model, str(target))
    except ValueError as error:  # protobuf's limit of 2 GiB
        raise unsupported(reason=f"its graph cannot be written ({first_line(error)})") from error


class _Int8Graph:
    """The nodes and constants of a graph whose products with constant matrices become products of 8-bit integers.

    A token's input `x` is `round(x / s) + 128` with `s = max |x| / 127`. A weight is at most 64 in size: CPUs without
    VNNI add two products in 16 bits, which larger ones would overflow. `MatMulIntegerToFloat` is an operator of ONNX
    Runtime: it multiplies by the weights' scales while a part of the product is in the processor's cache.
    """

    def __init__(self, model: ModelProto) -> None:
        self.graph, self.nodes, self.constants = model.graph, list["NodeProto"](), list["TensorProto"]()
        self._onnx = import_module("onnx")
        self._known = {entry.name: entry for entry in self.graph.initializer}
        self._matrices = set[str]()  # the constants that were quantised
        self._inputs: dict[str, tuple[str, str, str]] = {}  # an input -> its 8-bit form, its scales, its leading axes
        numbers = {"largest": np.float32(127), "least": np.float32(1e-30), "one": np.float32(1)}
        numbers |= {"zero": np.uint8(128), "last": np.array([1])}
        self._numbers = {name: self._constant(f"int8.{name}", value) for name, value in numbers.items()}
        if _RUNTIME not in [entry.domain for entry in model.opset_import]:
            model.opset_import.append(self._onnx.helper.make_opsetid(_RUNTIME, 1))

    def add(self, node: NodeProto, *, quantised: bool) -> None:
        """Add a node of the graph; if `quantised`, as a product of integers."""
        if not quantised:
            self.nodes.append(node)
            return
        attributes = {entry.name: self._onnx.helper.get_attribute_value(entry) for entry in node.attribute}
        name, output = node.input[1], node.output[0]
        self._matrices.add(name)
        weight = self._onnx.numpy_helper.to_array(self._known[name])
        weight = weight.T if attributes.get("transB") else weight
        scale = np.maximum(np.abs(weight).max(axis=0), 1e-30) / 64
        values, scales, axes = self._input(node.input[0], len(weight))
        matrix = self._constant(f"{output}.weight", np.round(weight / scale).astype(np.int8))
        factors = [self._numbers["one"], self._constant(f"{output}.scale", scale)]
        given = [values, matrix, *factors, self._numbers["zero"]]
        product = self._node("MatMulIntegerToFloat", given, f"{output}.product", domain=_RUNTIME)
        scaled = self._node("Mul", [product, scales], f"{output}.scaled")
        width = self._constant(f"{output}.width", np.array([weight.shape[1]]))
        shape = self._node("Concat", [axes, width], f"{output}.shape", axis=0)
        last = output if len(node.input) < 3 else f"{output}.unbiased"  # Gemm has a bias
        self._node("Reshape", [scaled, shape], last)
        if last != output:
            self._node("Add", [last, node.input[2]], output)

    def replace(self) -> None:
        """Write the nodes and constants into the graph, without the matrices that no node uses now."""
        used = {name for node in self.nodes for name in node.input}
        kept = [entry for entry in self.graph.initializer if entry.name in used or entry.name not in self._matrices]
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)
        del self.graph.initializer[:]
        self.graph.initializer.extend([*kept, *self.constants])

    def _input(self, name: str, width: int) -> tuple[str, str, str]:
        """Return the names of an input in 8 bits `[tokens, width]`, its scales `[tokens, 1]` and its leading axes.

        Several maps may share them. `Abs` would write a copy of the input, so the largest size is found without it.
        """
        if name not in self._inputs:
            known = self._numbers
            flat = self._node("Reshape", [name, self._constant(f"{name}.form", np.array([-1, width]))], f"{name}.flat")
            highest = self._node("ReduceMax", [flat, known["last"]], f"{name}.highest")
            least = self._node("ReduceMin", [flat, known["last"]], f"{name}.least")
            lowest = self._node("Neg", [least], f"{name}.lowest")
            size = self._node("Max", [highest, lowest, known["least"]], f"{name}.size")  # of a row of zeros too
            scales = self._node("Div", [size, known["largest"]], f"{name}.scales")
            listed = self._node("Squeeze", [scales, known["last"]], f"{name}.listed")
            rows = self._node("Shape", [listed], f"{name}.rows")
            zeros = self._node("Expand", [known["zero"], rows], f"{name}.zeros")
            values = self._node("QuantizeLinear", [flat, listed, zeros], f"{name}.int8", axis=0)
            self._inputs[name] = values, scales, self._node("Shape", [name], f"{name}.axes", end=-1)
        return self._inputs[name]

    def _node(self, kind: str, inputs: list[str], output: str, **attributes: int | str) -> str:
        """Add a node; return the name of its output."""
        self.nodes.append(self._onnx.helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def _constant(self, name: str, value: ArrayLike) -> str:
        """Add a constant, numbers in float32; return its name."""
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype.kind == "f" else array
        self.constants.append(self._onnx.numpy_helper.from_array(array, name))
        return name


def _nodes_of_base(bank: ReaderBank, graph: ModelProto) -> list[str]:
    """Return the names of the graph's nodes that multiply by a weight of the base model.

    They are found by the values of the weights, because the exporter folds transpositions and loses the names of these
    weights. Embeddings are left out: heads may use them.
    """
    model = bank.model
    parts = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(part.weight) for part in parts if part is not None}
    weights = [
        weight.detach().float() for weight in model.parameters() if weight.ndim == 2 and id(weight) not in tables
    ]
    known = {
        hashlib.sha256(matrix.contiguous().numpy().tobytes()).digest()
        for weight in weights
        for matrix in (weight, weight.T)
    }
    arrays = import_module("onnx.numpy_helper")
    of_base = {
        entry.name
        for entry in graph.graph.initializer
        if len(entry.dims) == 2 and hashlib.sha256(arrays.to_array(entry).tobytes()).digest() in known
    }
    return [node.name for node in graph.graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in of_base]
