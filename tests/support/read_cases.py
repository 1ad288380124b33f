"""Settings of every fusion and of every head, for tests that try them all."""

from __future__ import annotations

from typing import Any

from tests.support.formulas import SETTINGS
from tests.support.tiny import model_of

from lamina.fusion import FUSIONS
from lamina.heads import HEADS

LABELS = ("a", "b", "c")
FEW = [
    {"attention_heads": 4, "pooling": "attention", "problem_type": "classification", "class_weights": (1.0, 2.0, 3.0)},
    {"encoder_layers": 1, "feedforward": 24, "pooling": "mean"},
]
HEAD_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "audio_classification": FEW,
    "image_classification": FEW,  # the module is that of "sequence_classification"
    "causal_lm": [{"labels": ("token",)}],
    "masked_lm": [{"labels": ("token",)}],
    "sequence_classification": [
        {"attention_heads": 4},
        {"pooling": "mean"},
        {"pooling": "query"},
        {"pooling": "first"},
        {"encoder_layers": 2, "attention_heads": 4, "feedforward": 24, "pooling": "query"},
        {"problem_type": "multi_label", "class_weights": (1.0, 2.0, 3.0)},
        {"problem_type": "regression", "labels": ("score",)},
    ],
    "token_classification": [
        {"feedforward": 24},
        {"encoder_layers": 2, "attention_heads": 4, "feedforward": 24, "class_weights": (1.0, 2.0, 3.0)},
        {"encoder_layers": 0},
    ],
}
FUSED = {
    f"{name}-{number}": FUSIONS.get(name)(**settings)
    for name in FUSIONS.names()
    for number, settings in enumerate(SETTINGS.get(name, [{}]))
}
HEADED = {
    f"{name}-{number}": HEADS.get(name)(**({"labels": LABELS} | settings))
    for name in HEADS.names()
    for number, settings in enumerate(HEAD_SETTINGS.get(name, [{}]))
}


def built(head: str, dim: int = 32) -> Any:
    """A head's module; some need the model that is read."""
    return HEADED[head].build_on(model_of("bert"), dim)
