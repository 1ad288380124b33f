"""Heads turn the features of a fusion into the output of one task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.registry import Registry

if TYPE_CHECKING:
    from lamina.heads.base import HeadConfig

HEADS: Registry[HeadConfig] = Registry(
    "head",
    {
        "causal_lm": "lamina.heads.causal_lm:CausalLM",
        "masked_lm": "lamina.heads.masked_lm:MaskedLM",
        "sequence_classification": "lamina.heads.sequence_classification:SequenceClassification",
        "image_classification": "lamina.heads.sequence_classification:ImageClassification",
        "audio_classification": "lamina.heads.sequence_classification:AudioClassification",
        "token_classification": "lamina.heads.token_classification:TokenClassification",
    },
)
