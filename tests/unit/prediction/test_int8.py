"""A bank whose base is quantised: the scores before and after are stored, and too large a loss is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.support.stored import save_base, tiny_tokenizer

import lamina
from lamina import Reader, ReaderBank
from lamina.errors import ConfigError, StoreError
from lamina.fusion.scalar_mix import ScalarMix
from lamina.heads.sequence_classification import SequenceClassification
from lamina.prediction import int8
from lamina.prediction.int8 import export_int8
from lamina.store import load, save_bank
from lamina.store.onnx import MARK, OnnxFacts, export_onnx

ROWS = [
    ("the film is good .", "good"),
    ("the film is bad", "bad"),
    ("very bad", "bad"),
    ("very fun .", "good"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    bank = ReaderBank(load(save_base(folder / "base"))[0], tiny_tokenizer())
    bank.add("mood", Reader(ScalarMix(layers=[0, 1]), SequenceClassification(("bad", "good"), pooling="mean")))
    bank["mood"].info["columns"] = {"text": "text", "label": "mood"}
    save_bank(bank.eval(), folder / "bank")
    rows = [json.dumps({"text": text, "mood": mood}) for text, mood in ROWS * 3]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def facts(folder: Path) -> OnnxFacts:
    """Export the bank to "onnx-int8" in its folder, and keep the graph in float32: tracing takes seconds."""

    def kept(bank: ReaderBank, to: Path, **_: object) -> OnnxFacts:
        found = export_onnx(bank, to)
        shutil.copytree(to, folder / "float32")
        return found

    bank = ReaderBank.from_pretrained(folder / "bank")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "export_onnx", kept)
        return export_int8(bank, folder / "bank" / "onnx-int8", folder / "rows.jsonl", max_loss=1.0)


@pytest.mark.long
def test_a_base_in_int8_with_readers_in_float(folder: Path, facts: OnnxFacts):
    bank = ReaderBank.from_pretrained(folder / "bank")
    nodes = [node.op_type for node in onnx.load(str(folder / "bank" / "onnx-int8" / "model.onnx")).graph.node]
    # query, key, value, output and two maps of the feed-forward, in the one block that the reader needs
    assert nodes.count("MatMulIntegerToFloat") == 6
    assert facts.int8 is not None
    assert facts.int8["mood"].float32 == lamina.evaluate(bank, folder / "rows.jsonl")["mood"][facts.int8["mood"].metric]
    plain = lamina.predict(bank, [ROWS[0][0]], backend="torch")[0]["mood"]["probabilities"]["good"]
    quantised = lamina.predict(bank, [ROWS[0][0]], backend="int8")[0]["mood"]["probabilities"]["good"]
    assert 0 < abs(plain - quantised) < 0.05
    assert lamina.predict(bank, [ROWS[0][0]])[0]["mood"]["probabilities"]["good"] == plain  # "auto" never takes int8
    for beside in ("very " * 20, "bad", "anna zebra paris . ."):
        answer = lamina.predict(bank, [ROWS[0][0], beside], backend="int8")[0]["mood"]["probabilities"]["good"]
        assert answer == pytest.approx(quantised, abs=1e-6)


def graph_of(nodes: list[Any], constants: dict[str, np.ndarray], *, width: int) -> Any:
    """A model with the input "x" `[batch, tokens, 8]` (of Gemm `[batch, 8]`) and the output "y"."""
    rank = 2 if nodes[0].op_type == "Gemm" else 3
    places = [("x", [*"bt"][: rank - 1], 8), ("y", [*"bt"][: rank - 1], width)]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [*axes, last]) for name, axes, last in places)
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    opset = [helper.make_opsetid("", 18)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=opset, ir_version=10)


@pytest.mark.parametrize("kind", ["MatMul", "Gemm"])
def test_a_product_in_int8_has_a_scale_per_token(kind: str):
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(8, 5)).astype("f"), rng.normal(size=5).astype("f")
    if kind == "Gemm":
        constants = {"w": weight.T.copy(), "b": bias}
        node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="y", transB=1)
    else:
        constants, node, bias = {"w": weight}, helper.make_node("MatMul", ["x", "w"], ["y"], name="y"), np.zeros(5, "f")
    model = graph_of([node], constants, width=5)
    graph = int8._Int8Graph(model)
    graph.add(node, quantised=True)
    graph.replace()
    onnx.checker.check_model(model)
    assert "w" not in [entry.name for entry in model.graph.initializer]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = rng.normal(size=(3, 8)).astype("f") * np.array([[1], [1e4], [0]], "f")
    together = rows if kind == "Gemm" else rows[None]
    answers = session.run(None, {"x": together})[0].reshape(3, 5)
    sizes, largest = np.abs(rows), np.abs(weight).max(0)
    half_steps = sizes.sum(1, keepdims=True) * largest / 128 + sizes.max(1, keepdims=True) / 254 * (8 * largest)
    assert (np.abs(answers - (rows @ weight + bias)) <= half_steps + 1e-5).all()
    alone = session.run(None, {"x": together[:1] if kind == "Gemm" else together[:, :1]})[0].reshape(1, 5)
    np.testing.assert_allclose(alone[0], answers[0], rtol=1e-6)


@pytest.mark.long
def test_too_large_a_loss_is_refused(folder: Path, facts: OnnxFacts, monkeypatch: pytest.MonkeyPatch):
    def copied(_bank: ReaderBank, to: Path, **_: object) -> OnnxFacts:
        shutil.copytree(folder / "float32", to)
        return OnnxFacts.model_validate_json((to / MARK).read_text(encoding="utf-8"))

    bank = ReaderBank.from_pretrained(folder / "bank")
    monkeypatch.setattr(int8, "export_onnx", copied)
    with pytest.raises(StoreError, match=r"'mood' has a .* in int8 and .*; at most -1 may be lost"):
        export_int8(bank, folder / "out", folder / "rows.jsonl", max_loss=-1)
    assert not (folder / "out").exists()
    earlier = copied(bank, folder / "old")
    written = earlier.model_copy(update={"files": [*earlier.files, "vocab.txt"]}).model_dump_json()
    (folder / "old" / MARK).write_text(written, encoding="utf-8")
    (folder / "old" / "vocab.txt").touch()
    (folder / "old" / "notes.txt").touch()
    found = export_int8(bank, folder / "old", folder / "rows.jsonl", max_loss=1.0)
    assert {path.name for path in (folder / "old").iterdir()} == {*found.files, MARK, "notes.txt"}


def test_a_reader_without_rows_is_refused(folder: Path):
    bank = ReaderBank.from_pretrained(folder / "bank")
    with pytest.raises(ConfigError):  # before an export
        export_int8(bank, folder / "out", {}, max_loss=1)
    assert not (folder / "out").exists()
