"""Saving and loading: banks of readers, the models they read, and the fingerprints that tell one base from another.

The names load when first used, so that a command that needs only one of them is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.layers.fingerprints import fingerprint
    from lamina.store.bank import load_bank, save_bank
    from lamina.store.edited import save
    from lamina.store.hub import push_bank
    from lamina.store.loading import load, outline
    from lamina.store.models import empty_model, load_config, load_processor

_WHERE = {
    "save": "store.edited",
    "save_bank": "store.bank",
    "load_bank": "store.bank",
    "push_bank": "store.hub",
    "load": "store.loading",
    "outline": "store.loading",
    "load_processor": "store.models",
    "load_config": "store.models",
    "empty_model": "store.models",
    "fingerprint": "layers.fingerprints",
}

__all__ = [
    "empty_model",
    "fingerprint",
    "load",
    "load_bank",
    "load_config",
    "load_processor",
    "outline",
    "push_bank",
    "save",
    "save_bank",
]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'lamina.store' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"lamina.{_WHERE[name]}"), name)
