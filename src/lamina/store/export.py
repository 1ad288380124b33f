"""Readers out of the house: a plain PyTorch module that needs nothing of Lamina."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamina.bank import ReaderBank, ReaderModule
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import ProjectedFusion
from lamina.fusion.base import Fusion
from lamina.fusion.concat import ConcatFusion
from lamina.fusion.elementwise import ElementwiseFusion
from lamina.fusion.last_layer import LastLayerFusion
from lamina.fusion.mean import MeanFusion
from lamina.fusion.pooled_layers import PooledLayersFusion
from lamina.fusion.scalar_mix import ScalarMixFusion
from lamina.heads.base import PassThrough
from lamina.heads.sequence_classification import PooledClassificationHead
from lamina.heads.token_classification import TokenClassificationHead
from lamina.layers.adapters import backbone
from lamina.layers.stack import by_path
from lamina.store import plain_reader
from lamina.store.files import check_finite, staged, write_json, write_tensors
from lamina.store.manifest import READER, WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lamina.layers import LayerStack

MODULE = "lamina_reader.py"
Part = tuple[dict[str, Any], "dict[str, Tensor]"]  # settings and weights


def export_reader(bank: ReaderBank, name: str, folder: str | Path) -> None:
    """Write a reader as a plain PyTorch module: weights, settings, and a Python file that needs torch and safetensors.

    `lamina_reader.PlainReader.load(folder)` reads states `[tokens, width]` by layer and gives the logits that the bank
    gives, within 1e-5; the file also has the hooks with which a reader of tokens takes part in the passes of vLLM and
    SGLang. Layers that have no weight in the reader are left out.

    Args:
        bank: The bank.
        name: Of the reader. Its fusion is a sum (LastLayer, Mean, ScalarMix, Elementwise), AdaLayers or SingleLayer
            without positions, Concat, or PooledLayers; its head labels texts or tokens.
        folder: Where to; made if it is not there. A reader that was exported there before is replaced.

    Raises:
        UnknownNameError: If the bank has no such reader.
        ConfigError: If a reader of that kind cannot be exported.
        StoreError: If the folder cannot be written, or holds files of these names that were made by something else.
        NotFiniteError: If a weight of the reader holds NaN or infinity.
    """
    reader = bank[name]
    (fused, fusion), (said, head) = _fusion(name, reader), _head(name, reader)
    check_finite(f"reader '{name}'", reader.state_dict().items())
    active = [reader.layers[index] for index in reader.fusion.active_layers()]
    stack = bank.stacks[reader.stack]
    settings = {
        "format": plain_reader.FORMAT,
        "name": name,
        "kind": reader.config.head.kind,
        "problem_type": reader.config.head.problem_type,
        "labels": [str(label) for label in reader.config.head.labels],
        "model_type": str(bank.model.config.model_type),
        "stack": reader.stack,
        "width": stack.width,
        "layers": active,
        "points": _points(bank.model, stack, active),
        **fused,
        **said,
    }
    with staged(Path(folder), [MODULE, READER, WEIGHTS]) as stage:  # the first is in no saved bank
        write_json(stage / READER, settings)
        write_tensors(stage / WEIGHTS, {**fusion, **head})
        shutil.copyfile(plain_reader.__file__, stage / MODULE)


def _points(model: nn.Module, stack: LayerStack, layers: list[int]) -> dict[str, dict[str, Any]]:
    """Where each layer is seen, by the names that the model has in a server, which are those of its checkpoint."""
    inside = backbone(model)
    prefix: str = getattr(inside, "base_model_prefix", "")
    paths = {module: path for path, module in by_path(inside).items()}
    blocks, points = set(stack.blocks), {layer: stack.points[layer] for layer in layers}
    return {
        str(layer): {
            "module": f"{prefix}.{paths[point.module]}" if prefix else paths[point.module],
            "side": point.side,
            "block": point.module in blocks,
        }
        for layer, point in points.items()
    }


def _fusion(name: str, reader: ReaderModule) -> Part:
    fusion: Any = reader.fusion
    made = next((make for kind, make in _FUSIONS.items() if isinstance(fusion, kind)), None)
    if made is None or (not fusion.is_token_wise() and not isinstance(fusion, PooledLayersFusion)):
        what = type(reader.config.fusion).__name__ + ("" if made is None else "(positions=True)")
        raise ConfigError(
            f"export_reader: reader '{name}' has the fusion {what}, which is not exported. Use a sum of layers, "
            "AdaLayers or SingleLayer without positions, Concat, or PooledLayers."
        )
    with torch.no_grad():
        return made(fusion)


def _summed(scales: Callable[[Any], Tensor]) -> Callable[[Any], Part]:
    """Of a sum of layers, each times a number or a vector."""

    def part(fusion: Fusion) -> Part:
        rows = scales(fusion).reshape(fusion.layers, -1)[list(fusion.active_layers())]
        return {"fusion": "sum"}, {"scales": rows.expand(-1, fusion.width)}

    return part


def _projected(fusion: ProjectedFusion) -> Part:
    active = list(fusion.active_layers())
    projection = fusion.projection[active] if len(fusion.projection) > 1 else fusion.projection
    settings = {"fusion": "projected", "activation": fusion.config.output_activation}
    return settings, {"projection": projection, "weights": fusion.weights()[active]}


def _concat(fusion: ConcatFusion) -> Part:
    bias = {} if fusion.bias is None else {"bias": fusion.bias}
    return {"fusion": "concat"}, {"projection": fusion.projection, **bias}


def _pooled(fusion: PooledLayersFusion) -> Part:
    own = {"queries": fusion.queries, "projection": fusion.projection}
    return {"fusion": "pooled"}, {**own, "weights": fusion.scores.softmax(0)}


_FUSIONS: dict[type, Callable[[Any], Part]] = {
    LastLayerFusion: _summed(lambda fusion: torch.ones(fusion.layers)),
    MeanFusion: _summed(lambda fusion: fusion.importance()),
    ScalarMixFusion: _summed(lambda fusion: fusion.scale * fusion.scores.softmax(0)),
    ElementwiseFusion: _summed(lambda fusion: fusion.scales),
    ProjectedFusion: _projected,
    ConcatFusion: _concat,
    PooledLayersFusion: _pooled,
}


def _head(name: str, reader: ReaderModule) -> Part:
    head, config = reader.head, reader.config.head
    if not isinstance(head, PooledClassificationHead | TokenClassificationHead):
        came = f"reader '{name}' has a head for {config.kind}"
        raise ConfigError(f"export_reader: {came}; those that label texts or tokens are exported.")
    settings = {
        "encoders": getattr(config, "encoder_layers", 0),
        "attention_heads": head.config.attention_heads,
        "pooling": getattr(config, "pooling", ""),
        "linear": not isinstance(head.output, PassThrough),
    }
    return settings, head.state_dict()
