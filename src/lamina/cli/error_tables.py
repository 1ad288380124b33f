"""Tables of wrong answers on a terminal, with the spans in error marked in their texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamina.cli.output import print_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.text import Text

SHOWN = 600  # characters of a text, or of a part without an error between those that are marked
_STYLES = {"wrong": "bold yellow", "missed": "bold red", "extra": "bold magenta"}


def print_errors(reader: str, errors: Sequence[Mapping[str, Any]]) -> None:
    """Print a reader's wrong answers, as `evaluate` gives them."""
    if not errors:
        print(f"\n{reader}: every answer is right")
        return
    spans = any(isinstance(span, dict) for row in errors for span in (*_list(row["true"]), *_list(row["predicted"])))
    last = "error" if "error" in errors[0] else "confidence"
    texts, values = ("true", "predicted") if spans else ("text",), () if spans else ("true", "predicted")
    rows = [
        [
            str(row["row"]),
            *(marked(row["text"], row[side]) if spans else _plain(row["text"]) for side in texts),
            *(_value(row[side]) for side in values),
            row[last],
        ]
        for row in errors
    ]
    what = "largest errors" if last == "error" else "errors, most confident first"
    print_table(f"\n{reader}: {what}", ("row", *texts, *values, last), rows)


def marked(text: str, spans: Sequence[Mapping[str, Any]]) -> Text:
    """A text with its spans in brackets, each with its label and what is wrong: "[Ekeus|PER missed] heads for"."""
    from rich.text import Text

    out, at = Text(), 0
    for span in spans:
        out.append(shortened(text[at : span["start"]], SHOWN // 4))
        out.append(f"[{text[span['start'] : span['end']]}|{span['label']} {span['error']}]", _STYLES[span["error"]])
        at = span["end"]
    return out.append(shortened(text[at:], SHOWN // 4 if spans else SHOWN))


def shortened(text: str, most: int) -> str:
    """A text of at most about so many characters: a longer one loses words from its middle."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2].rsplit(None, 1)[0]} [...] {text[-most // 2 :].split(None, 1)[-1]}"


def _plain(text: Any) -> str:
    return "\n".join(shortened(" ".join(str(part).split()), SHOWN) for part in _list(text))


def _value(value: Any) -> Any:
    return ", ".join(value) or "-" if isinstance(value, list) else value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
