"""Lamina: read, edit and study the layers of a pretrained transformer.

The public names load when first used, so that importing the package is quick and needs no torch.
"""

from importlib import import_module

_WHERE = {
    "stacks": "layers",
    "tap": "layers",
    "AdaLayers": "fusion.ada_layers",
    "SingleLayer": "fusion.single_layer",
    "LastLayer": "fusion.last_layer",
    "Mean": "fusion.mean",
    "ScalarMix": "fusion.scalar_mix",
    "SequenceClassification": "heads.sequence_classification",
    "TokenClassification": "heads.token_classification",
    "Reader": "bank",
    "ReaderBank": "bank",
    "Task": "data.task",
    "fit": "train",
    "FitResult": "train",
    "evaluate": "train",
    "predict": "train",
    "LaminaError": "errors",
}

__all__ = [  # noqa: PLE0604  the keys are strings
    *_WHERE
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'lamina' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"lamina.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
