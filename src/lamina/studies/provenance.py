"""What a study's numbers depend on besides its options: the libraries, and the models' weights."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lamina.layers import stacks
from lamina.layers.fingerprints import fingerprint_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LIBRARIES = ("lamina", "torch", "transformers", "numpy", "scipy", "pandas")


def library_versions() -> dict[str, str]:
    """Library -> its version, of those that a study's numbers depend on."""
    return {name: _version(name) for name in _LIBRARIES}


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """What a model was: its name, class, family and dtype, and stack -> fingerprint of its weights; JSON-ready."""
    return {
        "name": model.name_or_path or None,
        "class": type(model).__name__,
        "family": str(model.config.model_type),
        "dtype": str(model.dtype).removeprefix("torch."),
        "fingerprints": {name: fingerprint_of(stack) for name, stack in stacks(model).items()},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
