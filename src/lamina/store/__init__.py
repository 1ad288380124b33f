"""Saving and loading: models, edited models, banks of readers, and the fingerprints that tell one base from another.

The names load when first used, so that a command that needs only one of them is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.layers.fingerprints import fingerprint as fingerprint
    from lamina.store.bank import load_bank as load_bank
    from lamina.store.bank import save_bank as save_bank
    from lamina.store.card import model_card as model_card
    from lamina.store.edited import save as save
    from lamina.store.hub import push_bank as push_bank
    from lamina.store.loading import load as load
    from lamina.store.loading import outline as outline
    from lamina.store.models import empty_model as empty_model
    from lamina.store.models import load_config as load_config
    from lamina.store.models import load_processor as load_processor
    from lamina.store.models import saved_class as saved_class

_WHERE = {
    "empty_model": "store.models",
    "fingerprint": "layers.fingerprints",
    "load": "store.loading",
    "load_bank": "store.bank",
    "load_config": "store.models",
    "load_processor": "store.models",
    "model_card": "store.card",
    "outline": "store.loading",
    "push_bank": "store.hub",
    "save": "store.edited",
    "save_bank": "store.bank",
    "saved_class": "store.models",
}

__all__ = list(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'lamina.store' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"lamina.{_WHERE[name]}"), name)
