"""YAML that knows the line of every key; a key that comes twice is an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from lamina.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class YamlFile:
    """What a YAML file holds.

    Attributes:
        fields: Its keys and values.
        root: Where each of them stands.
    """

    fields: dict[str, Any]
    root: yaml.Node

    def find(self, place: Sequence[object]) -> tuple[int, list[object]]:
        """The line of a key (from 1) and the part of `place` that the file has.

        Args:
            place: Keys and list positions, outermost first; what follows the last one that exists is ignored.
        """
        node, line, there = self.root, self.root.start_mark.line, []
        for part in place:
            if isinstance(node, yaml.MappingNode):
                pair = next((pair for pair in reversed(node.value) if pair[0].value == str(part)), None)
                if pair is None:
                    break
                line, node = pair[0].start_mark.line, pair[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
            else:
                break
            there.append(part)
        return line + 1, there


def read_yaml(path: Path, *, op: str, needs: str) -> YamlFile:
    """Read a YAML file of keys and values; no code in it is run.

    Args:
        path: Of the file.
        op: What it is, named in errors.
        needs: The keys that it must have, named where it has none.

    Raises:
        DataError: If the file is missing, not UTF-8 or not YAML, has a key twice, or holds no keys.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is not None:
            _check_keys(node, f"{op}: {path}", set())
        fields = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise DataError(f"{op}: {path} cannot be read ({error.strerror}); it must be a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{op}: {path} is not YAML; {' '.join(str(error).split())}.", path=str(path)) from error
    if node is None or not isinstance(fields, dict):
        raise DataError(f"{op}: {path} holds no keys; it needs {needs}.", path=str(path))
    return YamlFile(fields, node)


def _check_keys(node: yaml.Node, op: str, seen: set[int]) -> None:
    """Raise DataError where a mapping has a key twice; must come before keys of other mappings are merged in."""
    if id(node) in seen:
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    first = lines[key.value]
                    raise DataError(f"{op}, line {line}: the key '{key.value}' is also in line {first}.", row=line)
                lines[key.value] = line
            _check_keys(value, op, seen)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, op, seen)
