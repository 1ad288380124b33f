"""Saving and loading: banks of readers, the models they read, and the fingerprints that tell one base from another.

The names load when first used, so that a command that needs only one of them is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.store.bank import load_bank, save_bank
    from lamina.store.fingerprints import fingerprint
    from lamina.store.hub import push_bank
    from lamina.store.models import empty_model, load_config, load_model

_WHERE = {
    "save_bank": "bank",
    "load_bank": "bank",
    "push_bank": "hub",
    "load_model": "models",
    "load_config": "models",
    "empty_model": "models",
    "fingerprint": "fingerprints",  # a module of the same name would hide the function
}

__all__ = ["empty_model", "fingerprint", "load_bank", "load_config", "load_model", "push_bank", "save_bank"]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'lamina.store' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(f"lamina.store.{_WHERE[name]}"), name)
