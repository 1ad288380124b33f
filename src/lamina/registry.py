"""Registries: name -> class, one line per method, imported when first used, open to third parties."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from lamina.errors import ConfigError, check_known, convert_errors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

_providers: dict[str, str] = {}  # role -> module; `lamina/__init__.py` fills it


def set_provider(role: str, module: str) -> None:
    """Name the module that provides the functions for `role`, such as "storage".

    Code that must not import that module, because of the order of the package's rooms, gets it from `provider`.
    """
    _providers[role] = module


def provider(role: str) -> ModuleType:
    """Import and return the module that `set_provider` named for `role`; KeyError if none was named."""
    return import_module(_providers[role])


class Registry(Generic[T]):
    """A table from names to classes or functions, each written as "package.module:Name".

    The classes of fusions and heads are frozen configs. An entry is imported when `get` is called for it, not before.
    Third parties add entries with `add`, or by an entry point of their package in the group `lamina.<what>`.

    Args:
        what: Word for one entry, such as "fusion"; error messages begin with it.
        rows: Lamina's own entries.
    """

    def __init__(self, what: str, rows: dict[str, str]) -> None:
        self.what = what
        self._rows = dict(rows)
        self._has_entry_points = False

    def add(self, name: str, target: str) -> None:
        """Register `target` ("package.module:Name") under `name`; raise ConfigError if the name exists already."""
        if name in self._rows:
            raise ConfigError(f"{self.what}: '{name}' is already registered as {self._rows[name]}.")
        self._rows[name] = target

    def names(self) -> tuple[str, ...]:
        """Return every registered name in the order of registration.

        Entry points are looked up on the first call; they do not replace a name that exists.
        """
        if not self._has_entry_points:
            self._has_entry_points = True
            for point in entry_points(group=f"lamina.{self.what}"):
                self._rows.setdefault(point.name, point.value)
        return tuple(self._rows)

    def target(self, name: str) -> str:
        """Return the target "package.module:Name" that is registered under `name`, without importing it.

        Raises:
            UnknownNameError: If `name` is not registered.
        """
        check_known(self.what, [name], self.names())
        return self._rows[name]

    def get(self, name: str) -> type[T]:
        """Import and return the class or function that is registered under `name`.

        Raises:
            UnknownNameError: If `name` is not registered.
            ConfigError: If it cannot be imported.
        """
        row = self.target(name)
        message = f"{self.what}: '{name}' is registered as {row}, which cannot be imported"
        with convert_errors(lambda reason: ConfigError(f"{message} ({reason}).")):
            return EntryPoint(name, row, f"lamina.{self.what}").load()

    def name_of(self, config: object) -> str:
        """Return the name under which the class of `config` is registered; raise ConfigError if there is none."""
        defined_in, class_name = type(config).__module__, type(config).__qualname__
        for name in self.names():
            module, _, known = self._rows[name].partition(":")
            # an entry may name a module that only imports the class, so compare the class itself then
            if known == class_name and (module == defined_in or self.get(name) is type(config)):
                return name
        target = f"{defined_in}:{class_name}"
        raise ConfigError(f"{self.what}: {target} is not registered. Call add(name, '{target}') first.")

    def to_dict(self, config: T) -> dict[str, Any]:
        """Return the fields of a config as a JSON-ready dict, with its registered name under "name".

        Raises:
            ConfigError: If the config's class is not registered.
        """
        values = asdict(cast("DataclassInstance", config))
        settings = {field.name: values[field.name] for field in fields(cast("DataclassInstance", config)) if field.init}
        return {"name": self.name_of(config), **settings}

    def from_dict(self, fields_by_name: dict[str, Any]) -> T:
        """Build a config from a dict that `to_dict` returned; lists become tuples, which JSON does not have.

        Raises:
            UnknownNameError: If the name is not registered, or a key is not a field of the config.
            ConfigError: If "name" or a required field is missing, the class cannot be imported, or the config does not
                allow a value.
            TypeError: If the config compares a value of a wrong type, such as a string with a number.
        """
        rest = lists_to_tuples(fields_by_name)
        name = rest.pop("name", None)
        if not isinstance(name, str):
            known = ", ".join(self.names())
            raise ConfigError(f"{self.what}: no 'name' among {sorted(fields_by_name)}; known: {known}.")
        config_class = self.get(name)
        known = {field.name: field for field in fields(cast("type[DataclassInstance]", config_class)) if field.init}
        check_known(f"{self.what} '{name}'", rest, known, "key")
        required = [key for key, field in known.items() if field.default is field.default_factory is MISSING]
        if missing := [key for key in required if key not in rest]:
            raise ConfigError(f"{self.what} '{name}': no {', '.join(missing)} given; it is required.")
        return config_class(**rest)


def lists_to_tuples(value: Any) -> Any:  # noqa: ANN401
    """Return a copy of a JSON value with every list in it, at any depth, replaced by a tuple."""
    if isinstance(value, dict):
        return {key: lists_to_tuples(item) for key, item in value.items()}
    return tuple(map(lists_to_tuples, value)) if isinstance(value, list) else value


# The types of these entries, `Kind` and functions, stand in rooms that import this module.
KINDS: Registry[Any] = Registry(
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
)  # here and not in lamina.tasks, because `lamina.load` accepts the name of a kind as its `head`

STUDIES: Registry[Any] = Registry(
    "study",
    {
        "probe": "lamina.studies.probing.probe:probe",
        "similarity": "lamina.studies.states.similarity:similarity",
        "drift": "lamina.studies.states.drift:drift",
        "variability": "lamina.studies.states.variability:variability",
        "lens": "lamina.studies.states.lens:lens",
        "lens_tokens": "lamina.studies.states.lens:lens_tokens",
        "importance": "lamina.studies.states.importance:importance",
        "contributions": "lamina.studies.states.importance:contributions",
        "removal": "lamina.studies.cutting.removal:removal",
        "reinit": "lamina.studies.cutting.finetuned:reinit",
        "insertion": "lamina.studies.cutting.finetuned:insertion",
        "errors": "lamina.studies.probing.error_analysis:errors",
        "advise": "lamina.studies.cutting.advise:advise",
    },
)  # here and not in lamina.studies, because the help of `lamina study` lists the names without importing the room
