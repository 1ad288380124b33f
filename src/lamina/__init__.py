"""Lamina: read, edit and study the layers of a pretrained transformer.

The public names load when first used, so that importing the package is quick and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.bank import Reader, ReaderBank
    from lamina.editing.freeze import freeze_
    from lamina.editing.insert import insert_
    from lamina.editing.merge import merge_
    from lamina.editing.record import Edit, edits
    from lamina.editing.reinit import reinit_
    from lamina.editing.truncate import truncate_
    from lamina.errors import LaminaError
    from lamina.fusion.ada_layers import AdaLayers
    from lamina.fusion.concat import Concat
    from lamina.fusion.depth_lstm import DepthLSTM
    from lamina.fusion.dwatt import DWAtt
    from lamina.fusion.elementwise import Elementwise
    from lamina.fusion.extra_layers import ExtraLayers
    from lamina.fusion.gated import Gated
    from lamina.fusion.head2toe import Head2Toe
    from lamina.fusion.last_layer import LastLayer
    from lamina.fusion.mean import Mean
    from lamina.fusion.routing import Routing
    from lamina.fusion.scalar_mix import ScalarMix
    from lamina.fusion.single_layer import SingleLayer
    from lamina.heads.masked_lm import MaskedLM
    from lamina.heads.sequence_classification import SequenceClassification
    from lamina.heads.token_classification import TokenClassification
    from lamina.layers import stacks, tap
    from lamina.store.edited import load, save
    from lamina.tasks.task import Task
    from lamina.train import FitResult, evaluate, finetune, fit, predict, predict_file

_WHERE = {
    "AdaLayers": "fusion.ada_layers",
    "Concat": "fusion.concat",
    "DWAtt": "fusion.dwatt",
    "DepthLSTM": "fusion.depth_lstm",
    "Edit": "editing.record",
    "Elementwise": "fusion.elementwise",
    "ExtraLayers": "fusion.extra_layers",
    "FitResult": "train",
    "Gated": "fusion.gated",
    "Head2Toe": "fusion.head2toe",
    "LaminaError": "errors",
    "LastLayer": "fusion.last_layer",
    "MaskedLM": "heads.masked_lm",
    "Mean": "fusion.mean",
    "Reader": "bank",
    "ReaderBank": "bank",
    "Routing": "fusion.routing",
    "ScalarMix": "fusion.scalar_mix",
    "SequenceClassification": "heads.sequence_classification",
    "SingleLayer": "fusion.single_layer",
    "Task": "tasks.task",
    "TokenClassification": "heads.token_classification",
    "edits": "editing.record",
    "evaluate": "train",
    "finetune": "train",
    "fit": "train",
    "freeze_": "editing.freeze",
    "insert_": "editing.insert",
    "load": "store.edited",
    "merge_": "editing.merge",
    "predict": "train",
    "predict_file": "train",
    "reinit_": "editing.reinit",
    "save": "store.edited",
    "stacks": "layers",
    "tap": "layers",
    "truncate_": "editing.truncate",
}

__all__ = [
    "AdaLayers",
    "Concat",
    "DWAtt",
    "DepthLSTM",
    "Edit",
    "Elementwise",
    "ExtraLayers",
    "FitResult",
    "Gated",
    "Head2Toe",
    "LaminaError",
    "LastLayer",
    "MaskedLM",
    "Mean",
    "Reader",
    "ReaderBank",
    "Routing",
    "ScalarMix",
    "SequenceClassification",
    "SingleLayer",
    "Task",
    "TokenClassification",
    "edits",
    "evaluate",
    "finetune",
    "fit",
    "freeze_",
    "insert_",
    "load",
    "merge_",
    "predict",
    "predict_file",
    "reinit_",
    "save",
    "stacks",
    "tap",
    "truncate_",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'lamina' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"lamina.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
