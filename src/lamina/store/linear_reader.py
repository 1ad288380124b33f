"""Linear readers as a single linear map of pooled states: for scikit-learn, safetensors and ONNX."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast, final

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from lamina.bank.recorded_base import LINEAR
from lamina.errors import ConfigError, convert_errors, require_packages
from lamina.store.export import fusion_part, head_part
from lamina.store.files import damaged
from lamina.utils import atomic_write, parse_json

if TYPE_CHECKING:
    from os import PathLike

    import numpy.typing as npt
    from torch import Tensor

    from lamina.bank import ReaderBank

    Array: TypeAlias = npt.NDArray[np.generic]

_POOLINGS = ("mean", "first", "last", "")
_KEY = "lamina_linear"  # key of the settings in the metadata of a safetensors file


@final
@dataclass(frozen=True)
class LinearReader:
    """A linear map from the states of a text to its logits, `states @ weight.T + bias`.

    The features are the concatenated states of `layers`, each pooled over the tokens as `pooling` says.

    Attributes:
        layers: The layers, ascending, without those whose weight in the fusion is 0.
        labels: Names of the classes.
        pooling: How the tokens become one state: "mean", "first" or "last". "": each token has logits of its own.
        problem_type: "classification", "regression" or "multi_label".
        weight: Weight `[classes, layers * width]`, float64.
        bias: Bias `[classes]`, float64.
    """

    layers: tuple[int, ...]
    labels: tuple[str, ...]
    pooling: str
    problem_type: str
    weight: Tensor
    bias: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, bank: ReaderBank, name: str) -> Self:
        """Return the reader `name` of a bank as one linear map.

        Raises:
            UnknownNameError: If the bank does not have the reader.
            ConfigError: If the reader is not linear, or reads inside the model's blocks. Linear readers have the fusion
                Mean, LastLayer, ScalarMix, Elementwise or Concat, and a head that pools by "mean", "first" or "last",
                or one that labels tokens and has no encoder layers.
        """
        reader = bank[name]
        if reader.config.fusion.reads_inside:
            problem = f"'{name}' reads inside the blocks, and a linear map gets only the layers' states"
            raise ConfigError(f"linear reader: {problem}. Use the bank itself.")
        (fusion_settings, fusion), (settings, head) = fusion_part(name, reader), head_part(name, reader)
        if not isinstance(reader.fusion, LINEAR) or settings["encoders"] or settings["pooling"] not in _POOLINGS:
            how = f"pooling '{settings['pooling']}' and encoder_layers={settings['encoders']}"
            what = f"{type(reader.config.fusion).__name__} under a head with {how}"
            raise ConfigError(
                f"linear reader: '{name}' is {what}, which is not linear. Use Mean, LastLayer, ScalarMix, Elementwise "
                "or Concat, and pooling 'mean', 'first' or 'last' without encoder layers."
            )
        parts = {key: value.double().cpu() for key, value in {**fusion, **head}.items()}
        size = len(reader.config.head.labels)
        out, bias = parts.get("output.weight", torch.eye(size).double()), parts.get("output.bias", torch.zeros(size))
        if fusion_settings["fusion"] == "sum":
            weight = out.unsqueeze(1) * parts["scales"]
        else:
            weight = torch.einsum("cd,ldw->clw", out, parts["projection"])
            bias = bias + out @ parts["bias"] if "bias" in parts else bias
        return cls(
            layers=tuple(reader.layers[index] for index in reader.fusion.active_layers()),
            labels=tuple(str(label) for label in reader.config.head.labels),
            pooling=str(settings["pooling"]),
            problem_type=str(reader.config.head.problem_type),
            weight=weight.flatten(1),
            bias=bias.double(),
        )

    def to_sklearn(self) -> object:
        """Return a fitted scikit-learn model whose decision function returns this map's logits.

        It is a `LogisticRegression` for classes, named as in `labels`. If there are two, the decision function is the
        second logit minus the first. For several labels at once, it is a `OneVsRestClassifier`, whose classes are
        numbers, from 0, in the order of `labels`. For regression, it is a `LinearRegression`, whose predictions are the
        logits.

        Raises:
            MissingExtraError: If scikit-learn is not installed.
        """
        require_packages("linear reader", "sklearn", "sklearn")
        linear = import_module("sklearn.linear_model")
        weight, bias = self.weight.numpy(), self.bias.numpy()
        if self.problem_type == "regression":
            return _filled(linear.LinearRegression(), weight[0], float(bias[0]))
        if self.problem_type == "multi_label":
            multiclass, labels = (import_module(f"sklearn.{name}") for name in ("multiclass", "preprocessing"))
            model = multiclass.OneVsRestClassifier(linear.LogisticRegression())
            rows = zip(weight, bias, strict=True)
            model.estimators_ = [
                _filled(linear.LogisticRegression(), row[None], np.array([own]), np.arange(2)) for row, own in rows
            ]
            model.label_binarizer_ = labels.LabelBinarizer().fit(np.eye(len(bias), dtype=int))
            return model
        if len(bias) == 2:
            weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
        return _filled(linear.LogisticRegression(), weight, bias, np.array(self.labels))

    def save_safetensors(self, path: str | PathLike[str]) -> None:
        """Write the map to a safetensors file; its metadata has the layers, labels, pooling and problem type.

        An existing file is replaced. Raises StoreError if the file cannot be written.
        """
        content = save({"weight": self.weight.contiguous(), "bias": self.bias}, metadata={_KEY: self._facts})
        with atomic_write(Path(path)) as beside:
            beside.write_bytes(content)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a file that `save_safetensors` wrote; raise StoreError if it is missing, damaged or another file."""
        with (
            convert_errors(lambda reason: damaged(path, f"is not a linear reader ({reason})")),
            cast("Any", safe_open(str(path), "pt")) as file,
        ):
            metadata: dict[str, str] = file.metadata() or {}
            facts = parse_json(metadata[_KEY])  # later versions may write more keys
            layers, labels = tuple(facts["layers"]), tuple(facts["labels"])
            weight, bias = file.get_tensor("weight"), file.get_tensor("bias")
            return cls(layers, labels, facts["pooling"], facts["problem_type"], weight, bias)

    def save_onnx(self, path: str | PathLike[str]) -> None:
        """Write the map as an ONNX graph: input "states" `[rows, layers * width]`, output "logits" `[rows, classes]`.

        A row is the concatenation of the states of `layers`, lowest first, already pooled as `pooling` says; with
        pooling "", it is a token. Both are float32; the sums inside are float64.

        Raises:
            MissingExtraError: If the package onnx is not installed.
            StoreError: If the file cannot be written.
        """
        require_packages("linear reader", "onnx", "onnx")
        onnx = import_module("onnx")
        helper, single, double = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
        ends = [
            helper.make_tensor_value_info(name, single, ["rows", size])
            for name, size in (("states", self.weight.shape[1]), ("logits", self.weight.shape[0]))
        ]
        values = [
            onnx.numpy_helper.from_array(part.double().numpy(), name)
            for name, part in (("weight", self.weight), ("bias", self.bias))
        ]
        nodes = [
            helper.make_node("Cast", ["states"], ["exact"], to=double),
            helper.make_node("Gemm", ["exact", "weight", "bias"], ["sums"], transB=1),
            helper.make_node("Cast", ["sums"], ["logits"], to=single),
        ]
        graph = helper.make_graph(nodes, "linear_reader", ends[:1], ends[1:], values)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        helper.set_model_props(model, {_KEY: self._facts})
        with atomic_write(Path(path)) as beside:
            beside.write_bytes(model.SerializeToString())

    @property
    def _facts(self) -> str:
        """All fields except the tensors, as JSON."""
        return json.dumps({name: getattr(self, name) for name in ("layers", "labels", "pooling", "problem_type")})


def _filled(model: Any, weight: Array, bias: Array | float, classes: Array | None = None) -> Any:  # noqa: ANN401
    """Set `weight` and `bias` of a scikit-learn model as if it had been fitted, and return the model.

    `classes` are the class labels; None: a regression.
    """
    model.coef_, model.intercept_, model.n_features_in_ = weight, bias, weight.shape[-1]
    if classes is not None:
        model.classes_ = classes
    return model
