"""Lamina: read, edit and study the layers of a pretrained transformer.

The public names load when first used, so that importing the package is quick and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.bank import Reader as Reader
    from lamina.bank import ReaderBank as ReaderBank
    from lamina.editing.freeze import freeze_ as freeze_
    from lamina.editing.insert import insert_ as insert_
    from lamina.editing.merge import merge_ as merge_
    from lamina.editing.record import Edit as Edit
    from lamina.editing.record import edits as edits
    from lamina.editing.reinit import reinit_ as reinit_
    from lamina.editing.truncate import truncate_ as truncate_
    from lamina.errors import LaminaError as LaminaError
    from lamina.fusion.ada_layers import AdaLayers as AdaLayers
    from lamina.fusion.concat import Concat as Concat
    from lamina.fusion.depth_lstm import DepthLSTM as DepthLSTM
    from lamina.fusion.dwatt import DWAtt as DWAtt
    from lamina.fusion.elementwise import Elementwise as Elementwise
    from lamina.fusion.extra_layers import ExtraLayers as ExtraLayers
    from lamina.fusion.gated import Gated as Gated
    from lamina.fusion.head2toe import Head2Toe as Head2Toe
    from lamina.fusion.last_layer import LastLayer as LastLayer
    from lamina.fusion.mean import Mean as Mean
    from lamina.fusion.routing import Routing as Routing
    from lamina.fusion.scalar_mix import ScalarMix as ScalarMix
    from lamina.fusion.single_layer import SingleLayer as SingleLayer
    from lamina.heads.masked_lm import MaskedLM as MaskedLM
    from lamina.heads.sequence_classification import SequenceClassification as SequenceClassification
    from lamina.heads.token_classification import TokenClassification as TokenClassification
    from lamina.layers import stacks as stacks
    from lamina.layers import tap as tap
    from lamina.store.edited import save as save
    from lamina.store.loading import load as load
    from lamina.tasks.task import Task as Task
    from lamina.train import FitResult as FitResult
    from lamina.train import evaluate as evaluate
    from lamina.train import finetune as finetune
    from lamina.train import fit as fit
    from lamina.train import predict as predict
    from lamina.train import predict_file as predict_file

_NAMES = {
    "bank": "Reader ReaderBank",
    "editing.freeze": "freeze_",
    "editing.insert": "insert_",
    "editing.merge": "merge_",
    "editing.record": "Edit edits",
    "editing.reinit": "reinit_",
    "editing.truncate": "truncate_",
    "errors": "LaminaError",
    "fusion.ada_layers": "AdaLayers",
    "fusion.concat": "Concat",
    "fusion.depth_lstm": "DepthLSTM",
    "fusion.dwatt": "DWAtt",
    "fusion.elementwise": "Elementwise",
    "fusion.extra_layers": "ExtraLayers",
    "fusion.gated": "Gated",
    "fusion.head2toe": "Head2Toe",
    "fusion.last_layer": "LastLayer",
    "fusion.mean": "Mean",
    "fusion.routing": "Routing",
    "fusion.scalar_mix": "ScalarMix",
    "fusion.single_layer": "SingleLayer",
    "heads.masked_lm": "MaskedLM",
    "heads.sequence_classification": "SequenceClassification",
    "heads.token_classification": "TokenClassification",
    "layers": "stacks tap",
    "store.edited": "save",
    "store.loading": "load",
    "tasks.task": "Task",
    "train": "FitResult evaluate finetune fit predict predict_file",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'lamina' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"lamina.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
