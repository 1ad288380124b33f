"""A kind of task in one file, as a third party would write it, and how it is registered."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lamina.heads import HEADS
from lamina.tasks import KINDS, kind_of

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

FILE = '''
"""How often does the letter z stand in a text: never, once, or more often? The texts are their own labels."""

from dataclasses import dataclass

import numpy as np

from lamina.heads.base import HeadConfig
from lamina.heads.sequence_classification import SequenceClassification
from lamina.tasks import labels as lab
from lamina.tasks.base import checked_texts
from lamina.tasks.inputs import ClassKind, ClassResults, TextInputs, first_window_targets
from lamina.tasks.split import Split

COUNTS = ("never", "once", "often")


class LetterKind(ClassKind):
    name = "letters"
    problem_types = {"classification": ("accuracy", "f1")}
    auto_class = "AutoModelForSequenceClassification"

    def build(self, spec, tables):
        spec = lab.without_classes(spec, COUNTS, "classification", "counts of a letter")
        texts = {part: lab.texts(table, spec.text) for part, table in tables.items()}
        return spec, {part: Split.of(some, [min(text.count("z"), 2) for text in some]) for part, some in texts.items()}

    def encode(self, split, processor, options):
        return TextInputs.of(split, processor, options)

    def targets(self, task, split, inputs):
        return first_window_targets(split, inputs.encoded)

    def configure(self, config, task):
        super().configure(config, task)
        config.problem_type = "single_label_classification"

    def results(self, task, split, inputs):
        return ClassResults(task, split, np.where(inputs.encoded.window == 0, inputs.encoded.text, -1))

    def examples(self, raw, processor):
        return Split.of(checked_texts(raw, pairs=False))


@dataclass(frozen=True)
class Letters(HeadConfig):
    labels: tuple[str, ...] = COUNTS
    dropout: float = 0.0

    kind = "letters"

    def build(self, dim):
        return SequenceClassification(self.labels, dropout=self.dropout, pooling="mean").build(dim)
'''


def register_letters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the file, register its kind and its head until the test ends, and return the kind."""
    (folder / "letter_kind.py").write_text(FILE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "letter_kind", raising=False)
    for registry, target in ((KINDS, "letter_kind:LetterKind"), (HEADS, "letter_kind:Letters")):
        monkeypatch.setattr(registry, "_rows", dict(zip(registry.names(), registry._rows.values(), strict=True)))
        registry.add("letters", target)
    kind_of.cache_clear()
    return kind_of("letters")
