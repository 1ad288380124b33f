"""Lamina: read, edit and study the layers of a pretrained transformer.

The public names load when first used, so that importing the package is quick and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.data.task import Task
    from lamina.errors import LaminaError
    from lamina.fusion.ada_layers import AdaLayers
    from lamina.fusion.last_layer import LastLayer
    from lamina.fusion.mean import Mean
    from lamina.fusion.scalar_mix import ScalarMix
    from lamina.fusion.single_layer import SingleLayer
    from lamina.heads.sequence_classification import SequenceClassification
    from lamina.heads.token_classification import TokenClassification
    from lamina.layers import stacks, tap
    from lamina.reader import Reader
    from lamina.train import FitResult, evaluate, fit, predict

_WHERE = {
    "AdaLayers": "fusion.ada_layers",
    "FitResult": "train",
    "LaminaError": "errors",
    "LastLayer": "fusion.last_layer",
    "Mean": "fusion.mean",
    "Reader": "reader",
    "ReaderBank": "bank",
    "ScalarMix": "fusion.scalar_mix",
    "SequenceClassification": "heads.sequence_classification",
    "SingleLayer": "fusion.single_layer",
    "Task": "data.task",
    "TokenClassification": "heads.token_classification",
    "evaluate": "train",
    "fit": "train",
    "predict": "train",
    "stacks": "layers",
    "tap": "layers",
}

__all__ = [
    "AdaLayers",
    "FitResult",
    "LaminaError",
    "LastLayer",
    "Mean",
    "Reader",
    "ReaderBank",
    "ScalarMix",
    "SequenceClassification",
    "SingleLayer",
    "Task",
    "TokenClassification",
    "evaluate",
    "fit",
    "predict",
    "stacks",
    "tap",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'lamina' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"lamina.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
