"""Tables of methods: one line each, imported when first used, open to third parties."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lamina.errors import ConfigError, check_known, convert_errors


class Registry:
    """Maps the name of a method to the frozen config class that builds it, as "package.module:Class".

    `what` is what the rows are, in the singular ("fusion"). Third parties call `add`, or ship an entry point in the
    group `lamina.<what>`.
    """

    def __init__(self, what: str, rows: dict[str, str]) -> None:
        self.what = what
        self._rows = dict(rows)
        self._has_entry_points = False

    def add(self, name: str, target: str) -> None:
        """Register `target` ("package.module:Class") under `name`; ConfigError if the name is taken."""
        if name in self._rows:
            raise ConfigError(f"{self.what}: '{name}' is already registered as {self._rows[name]}.")
        self._rows[name] = target

    def names(self) -> tuple[str, ...]:
        """Every registered name, in the order of registration."""
        if not self._has_entry_points:
            self._has_entry_points = True
            for point in entry_points(group=f"lamina.{self.what}"):
                self._rows.setdefault(point.name, point.value)
        return tuple(self._rows)

    def target(self, name: str) -> str:
        """Return the "package.module:Class" that `name` is registered as, without importing it."""
        check_known(self.what, [name], self.names())
        return self._rows[name]

    def get(self, name: str) -> type[Any]:
        """The config class of a name; UnknownNameError if there is none, ConfigError if it cannot be imported."""
        row = self.target(name)
        told = f"{self.what}: '{name}' is registered as {row}, which cannot be imported"
        with convert_errors(lambda reason: ConfigError(f"{told} ({reason}).")):
            return EntryPoint(name, row, f"lamina.{self.what}").load()

    def name_of(self, config: object) -> str:
        """The name under which the class of `config` is registered; ConfigError if it is not."""
        own, kind = type(config).__module__, type(config).__qualname__
        for name in self.names():
            module, _, known = self._rows[name].partition(":")
            if known == kind and (module == own or self.get(name) is type(config)):  # a row may name who imports it
                return name
        target = f"{own}:{kind}"
        raise ConfigError(f"{self.what}: {target} is not registered. Call add(name, '{target}') first.")

    def to_dict(self, config: Any) -> dict[str, Any]:
        """The config as JSON-ready fields, its registered name under "name"."""
        return {"name": self.name_of(config), **asdict(config)}

    def from_dict(self, given: dict[str, Any]) -> Any:
        """Build the config that `to_dict` described; lists, which JSON has in place of tuples, become tuples.

        Raises:
            UnknownNameError: If the name or one of the keys does not exist.
            ConfigError: If the name or a required key is missing, or the config refuses a value.
        """
        rest = lists_to_tuples(given)
        name = rest.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{self.what}: no 'name' among {sorted(given)}; known: {', '.join(self.names())}.")
        kind = self.get(name)
        known = {field.name: field for field in fields(kind) if field.init}
        check_known(f"{self.what} '{name}'", rest, known, "key")
        required = [key for key, field in known.items() if field.default is field.default_factory is MISSING]
        if missing := [key for key in required if key not in rest]:
            raise ConfigError(f"{self.what} '{name}': no {', '.join(missing)} given; it is required.")
        return kind(**rest)


def lists_to_tuples(value: Any) -> Any:
    """A value with tuples in place of lists, at every depth."""
    if isinstance(value, dict):
        return {key: lists_to_tuples(item) for key, item in value.items()}
    return tuple(map(lists_to_tuples, value)) if isinstance(value, list) else value


KINDS = Registry(
    "kind",
    {
        "sequence_classification": "lamina.tasks.sequence_classification:SequenceClassificationKind",
        "token_classification": "lamina.tasks.token_classification:TokenClassificationKind",
        "masked_lm": "lamina.tasks.masked_lm:MaskedLMKind",
        "summarization": "lamina.tasks.text_to_text:SummarizationKind",
        "translation": "lamina.tasks.text_to_text:TranslationKind",
        "causal_lm": "lamina.tasks.causal_lm:CausalLMKind",
        "image_classification": "lamina.tasks.image_classification:ImageClassificationKind",
        "audio_classification": "lamina.tasks.audio_classification:AudioClassificationKind",
    },
)  # here, and not in lamina.tasks, because `lamina.load` takes a kind's name for the head to load

STUDIES = Registry(
    "study",
    {
        "probe": "lamina.studies.probe:probe",
        "similarity": "lamina.studies.similarity:similarity",
        "drift": "lamina.studies.drift:drift",
        "variability": "lamina.studies.variability:variability",
        "lens": "lamina.studies.lens:lens",
        "lens_tokens": "lamina.studies.lens_tokens:lens_tokens",
        "importance": "lamina.studies.importance:importance",
        "contributions": "lamina.studies.contributions:contributions",
        "removal": "lamina.studies.removal:removal",
        "reinit": "lamina.studies.reinit:reinit",
        "insertion": "lamina.studies.insertion:insertion",
        "errors": "lamina.studies.errors:errors",
        "advise": "lamina.studies.advise:advise",
    },
)  # name -> the function; here, and not in lamina.studies, because the help of `lamina study` names them
