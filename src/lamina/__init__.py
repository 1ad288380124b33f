"""Read, edit and study the layers of a pretrained transformer.

Each public name loads when it is first used, so importing the package is quick and needs no torch.
"""

import sys
import warnings
from importlib import import_module

if sys.version_info < (3, 11):  # noqa: UP036  before any module that older versions cannot read
    raise ImportError(f"lamina: this is Python {sys.version.split()[0]}; 3.11 or newer is needed.")

from lamina.registry import set_provider

# The public API has methods and functions in rooms that may not import the code behind them: a bank saves itself and
# checks the edits of its model, and `lamina.monitors` fits thresholds. Only this module knows both sides.
set_provider("edits", "lamina.editing.record")
set_provider("storage", "lamina.store")
set_provider("monitor fitting", "lamina.prediction")

# Public name -> the module that defines it. `__init__.pyi` repeats the names for type checkers.
_MODULES = {
    "fusion": "lamina",
    "monitors": "lamina",
    "studies": "lamina",
    "Reader": "lamina.bank",
    "ReaderBank": "lamina.bank",
    "duplicate_": "lamina.editing.duplicate",
    "freeze_": "lamina.editing.freeze",
    "insert_": "lamina.editing.insert",
    "drop_": "lamina.editing.keep",
    "keep_": "lamina.editing.keep",
    "merge_": "lamina.editing.merge",
    "Edit": "lamina.editing.record",
    "edits": "lamina.editing.record",
    "reinit_": "lamina.editing.reinit",
    "truncate_": "lamina.editing.keep",
    "LaminaError": "lamina.errors",
    "LaminaClassifier": "lamina.estimators.predictors",
    "LaminaRegressor": "lamina.estimators.predictors",
    "LaminaTagger": "lamina.estimators.predictors",
    "LaminaTransformer": "lamina.estimators.transformer",
    "AdaLayers": "lamina.fusion.ada_layers",
    "Concat": "lamina.fusion.concat",
    "DWAtt": "lamina.fusion.dwatt",
    "PairedLayers": "lamina.fusion.paired_layers",
    "PooledLayers": "lamina.fusion.pooled_layers",
    "ScalarMix": "lamina.fusion.scalar_mix",
    "SingleLayer": "lamina.fusion.single_layer",
    "CausalLM": "lamina.heads.causal_lm",
    "MaskedLM": "lamina.heads.masked_lm",
    "AudioClassification": "lamina.heads.sequence_classification",
    "ImageClassification": "lamina.heads.sequence_classification",
    "SequenceClassification": "lamina.heads.sequence_classification",
    "TokenClassification": "lamina.heads.token_classification",
    "stacks": "lamina.layers",
    "tap": "lamina.layers",
    "Monitor": "lamina.monitors.monitor",
    "save": "lamina.store.save_model",
    "load": "lamina.store.load_model",
    "Task": "lamina.tasks.task",
    "evaluate": "lamina.prediction",
    "monitor": "lamina.prediction",
    "finetune": "lamina.train",
    "fit": "lamina.train",
    "predict": "lamina.prediction",
    "predict_file": "lamina.prediction",
}

# Names that were public here until 0.1.0 -> where they are now. They go in 0.2.0.
_MOVED = {
    "DepthLSTM": "lamina.fusion",
    "Elementwise": "lamina.fusion",
    "ExtraLayers": "lamina.fusion",
    "Gated": "lamina.fusion",
    "Head2Toe": "lamina.fusion",
    "LastLayer": "lamina.fusion",
    "Mean": "lamina.fusion",
    "Routing": "lamina.fusion",
    "calibrate": "lamina.monitors",
    "export_reader": "lamina.store.export",
}

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _MOVED:
        new = f"{_MOVED[name]}.{name}"
        warnings.warn(f"lamina.{name} is now {new}; the old name goes in 0.2.0.", DeprecationWarning, stacklevel=2)
        return getattr(import_module(_MOVED[name]), name)
    if name not in _MODULES:
        raise AttributeError(f"module 'lamina' has no attribute '{name}'; it has {', '.join(__all__)}")
    import_module("lamina.utils").check_versions()
    if _MODULES[name] == __name__:  # a room of its own, such as `lamina.studies`
        return import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return __all__
