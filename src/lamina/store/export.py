"""Export a reader as a plain PyTorch module that does not need Lamina."""

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
    from os import PathLike

    from torch import Tensor, nn

    from lamina.layers import LayerStack
    from lamina.utils import JSON

MODULE = "lamina_reader.py"
# The settings and the weights of a fusion or a head, which `PlainReader` needs to compute what it computes.
Part = tuple[dict[str, "JSON"], "dict[str, Tensor]"]
Export = Callable[[Any], Part]  # function that exports a fusion of one class


def export_reader(bank: ReaderBank, name: str, folder: str | PathLike[str]) -> None:
    """Write a reader as a plain PyTorch module: weights, settings, and a Python file that needs no Lamina.

    `lamina_reader.PlainReader.load(folder)` loads the reader. It computes logits from a mapping of layer to states
    `[tokens, width]`; they equal the logits of the bank within 1e-5. Readers with `PlainReader.per_token` can also run
    inside SGLang, by the file's hooks. Layers with weight 0 in the fusion are left out.

    Args:
        bank: The bank.
        name: Name of the reader. Its fusion must be a sum of layers (LastLayer, Mean, ScalarMix, Elementwise),
            AdaLayers or SingleLayer without positions, Concat, or PooledLayers. Its head must label texts or tokens.
        folder: Folder to write; created if it does not exist. A reader exported there before is replaced, except after
            errors.

    Raises:
        UnknownNameError: If the bank does not have the reader.
        ConfigError: If the fusion or head cannot be exported (as a fusion that reads inside the blocks), or the model's
            states are not `[batch, tokens, width]`.
        StoreError: If the folder cannot be written, or other software wrote files of these names there.
        NotFiniteError: If a weight of the reader holds NaN or infinity.
    """
    reader = bank[name]
    fusion_settings, fusion_weights = fusion_part(name, reader)
    head_settings, head_weights = head_part(name, reader)
    check_finite(f"reader '{name}'", reader.state_dict().items())
    active = [reader.layers[index] for index in reader.fusion.active_layers()]
    stack = bank.stacks[reader.stack]
    settings: dict[str, JSON] = {
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
        **fusion_settings,
        **head_settings,
    }
    with staged(Path(folder), [MODULE, READER, WEIGHTS]) as stage:  # MODULE is the mark, since no saved bank has it
        write_json(stage / READER, settings)
        write_tensors(stage / WEIGHTS, {**fusion_weights, **head_weights})
        shutil.copyfile(plain_reader.__file__, stage / MODULE)


def _points(model: nn.Module, stack: LayerStack, layers: list[int]) -> dict[str, JSON]:
    """Return layer (as a string) -> the place in the model where the layer's state is read, for `reader.json`.

    A place is a dict: "module" is the name of a module, as in a checkpoint with a head (and in vLLM and SGLang), "side"
    its "input" or "output", and "block" tells whether it is a block of `stack`. Raises ConfigError if blocks return
    states of a shape other than `[batch, tokens, width]`.
    """
    inside = backbone(model)
    prefix: str = getattr(inside, "base_model_prefix", "")
    paths = {module: path for path, module in by_path(inside).items()}
    blocks = set(stack.blocks)
    if stack.is_converted:
        problem = "the model's blocks pass on states that are not [batch, tokens, width]"
        raise ConfigError(f"export_reader: {problem}, and an exported reader cannot read them. Use the bank itself.")
    points: dict[str, JSON] = {}
    for layer in layers:
        point = stack.points[layer]
        path = paths[point.module]
        name = f"{prefix}.{path}" if prefix else path
        points[str(layer)] = {"module": name, "side": point.side, "block": point.module in blocks}
    return points


def fusion_part(name: str, reader: ReaderModule) -> Part:
    """Return the settings and weights of the fusion of reader `name`; ConfigError if it cannot be exported."""
    fusion = reader.fusion
    if reader.config.fusion.reads_inside:
        problem = f"reader '{name}' reads inside the blocks, and an exported reader gets only the layers' states"
        raise ConfigError(f"export_reader: {problem}. Use the bank itself.")
    export = next((function for kind, function in _FUSIONS.items() if isinstance(fusion, kind)), None)
    if export is None or (not fusion.is_token_wise() and not isinstance(fusion, PooledLayersFusion)):
        what = type(reader.config.fusion).__name__ + ("" if export is None else "(positions=True)")
        raise ConfigError(
            f"export_reader: reader '{name}' has the fusion {what}, which is not exported. Use a sum of layers, "
            "AdaLayers or SingleLayer without positions, Concat, or PooledLayers."
        )
    with torch.no_grad():
        return export(fusion)


def _sum_of(scales: Callable[[Any], Tensor]) -> Export:
    """Return a function that exports a fusion that is a weighted sum of layers.

    `scales(fusion)` returns the weights of the layers, `[layers]` or `[layers, width]`.
    """

    def part(fusion: Fusion) -> Part:
        rows = scales(fusion).reshape(fusion.layers, -1)[list(fusion.active_layers())]
        return {"fusion": "sum"}, {"scales": rows.expand(-1, fusion.width)}

    return part


def _projected(fusion: ProjectedFusion) -> Part:
    """Return the settings of AdaLayers or SingleLayer, and the projections and weights of the active layers."""
    active = list(fusion.active_layers())
    projection = fusion.projection[active] if len(fusion.projection) > 1 else fusion.projection
    settings = {"fusion": "projected", "activation": fusion.config.output_activation}
    return settings, {"projection": projection, "weights": fusion.weights()[active]}


def _concat(fusion: ConcatFusion) -> Part:
    bias = {} if fusion.bias is None else {"bias": fusion.bias}
    return {"fusion": "concat"}, {"projection": fusion.projection, **bias}


def _pooled(fusion: PooledLayersFusion) -> Part:
    weights = {"queries": fusion.queries, "projection": fusion.projection, "weights": fusion.scores.softmax(0)}
    return {"fusion": "pooled"}, weights


_FUSIONS: dict[type, Export] = {
    LastLayerFusion: _sum_of(lambda fusion: torch.ones(fusion.layers)),
    MeanFusion: _sum_of(lambda fusion: fusion.importance()),
    ScalarMixFusion: _sum_of(lambda fusion: fusion.scale * fusion.scores.softmax(0)),
    ElementwiseFusion: _sum_of(lambda fusion: fusion.scales),
    ProjectedFusion: _projected,
    ConcatFusion: _concat,
    PooledLayersFusion: _pooled,
}


def head_part(name: str, reader: ReaderModule) -> Part:
    """Return the settings and weights of the head of reader `name`; ConfigError if it cannot be exported."""
    head, config = reader.head, reader.config.head
    if not isinstance(head, PooledClassificationHead | TokenClassificationHead):
        problem = f"reader '{name}' has a head for {config.kind}"
        raise ConfigError(f"export_reader: {problem}; those that label texts or tokens are exported.")
    settings = {
        "encoders": getattr(config, "encoder_layers", 0),
        "attention_heads": head.config.attention_heads,
        "pooling": getattr(config, "pooling", ""),
        "linear": not isinstance(head.output, PassThrough),
    }
    return settings, head.state_dict()
