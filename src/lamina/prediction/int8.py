"""Export a bank with a quantised base model, and measure the effect on every task's score."""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, StoreError, UnsupportedModelError, first_line, require_packages
from lamina.prediction.backends import engine_in_use
from lamina.prediction.evaluate import evaluate
from lamina.store.files import staged, write_json
from lamina.store.onnx import GRAPH, MARK, WEIGHTS, Int8Score, OnnxFacts, export_onnx, exported_files, hash_of_graph
from lamina.store.onnx_engine import OnnxEngine
from lamina.tasks.metrics import LOWER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task

_OP = "export"


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

    onnxruntime quantises the weights of the base model's linear maps once, with a scale per output. It quantises the
    inputs of these maps in each pass ("dynamic quantisation"). Every task is scored on its validation rows, in
    PyTorch before the export and with the graph after it.

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
        with engine_in_use(bank, "int8", OnnxEngine.open(bank, stage)):
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

    Raises UnsupportedModelError if the base has no linear map, or onnxruntime cannot quantise it.
    """
    onnx, quantization = import_module("onnx"), import_module("onnxruntime.quantization")
    nodes = _nodes_of_base(bank, onnx.load(str(source)))
    model_type, hint = str(bank.model.config.model_type), "Export it without int8."
    unsupported = partial(UnsupportedModelError, op=_OP, model_type=model_type, hint=hint)
    if not nodes:
        raise unsupported(reason="it has no linear map to quantise")
    root = logging.getLogger()
    root.addFilter(_is_shown)
    try:
        quantization.quantize_dynamic(
            str(source),
            str(target),
            op_types_to_quantize=["MatMul", "Gemm"],
            nodes_to_quantize=nodes,
            per_channel=True,
            reduce_range=True,  # CPUs without VNNI add two products in 16 bits, which 8-bit weights would overflow
            weight_type=quantization.QuantType.QInt8,
        )
    except Exception as error:  # onnxruntime raises many unrelated classes
        raise unsupported(reason=f"onnxruntime cannot quantise it ({first_line(error)})") from error
    finally:
        root.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    """Return False for onnxruntime's advice to optimise a graph first, which is for images; else True."""
    return "pre-processing before quantization" not in str(record.msg)


def _nodes_of_base(bank: ReaderBank, graph: Any) -> list[str]:  # noqa: ANN401
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
    return [
        node.name
        for node in graph.graph.node
        if node.op_type in ("MatMul", "Gemm") and of_base.intersection(node.input)
    ]
