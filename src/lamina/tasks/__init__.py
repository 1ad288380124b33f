"""Tasks: labelled examples, what is asked about them, and how the answers are scored."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from lamina.registry import Registry

if TYPE_CHECKING:
    from lamina.tasks.base import Kind

KINDS = Registry(
    "kind",
    {
        "sequence_classification": "lamina.tasks.sequence_classification:SequenceClassificationKind",
        "token_classification": "lamina.tasks.token_classification:TokenClassificationKind",
        "masked_lm": "lamina.tasks.masked_lm:MaskedLMKind",
        "summarization": "lamina.tasks.text_to_text:SummarizationKind",
        "translation": "lamina.tasks.text_to_text:TranslationKind",
        "image_classification": "lamina.tasks.image_classification:ImageClassificationKind",
    },
)


@cache
def kind_of(name: str) -> Kind:
    """What a kind of task says of itself.

    Raises:
        UnknownNameError: If there is no such kind; names those that exist.
    """
    return KINDS.get(name)()
