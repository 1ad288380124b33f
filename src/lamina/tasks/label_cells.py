"""Decide what a label cell is: a class name, a list of class names, a number, or a missing label.

Everything that reads labels uses these functions, so that a cell means the same everywhere. A cell that is none of
these raises a `LabelCellError`. Its text says what the cell is and what to do; callers add file and row.
"""

from __future__ import annotations

import ast
import io
import itertools
import math
import re
import tokenize
import unicodedata
from collections.abc import Collection, Mapping
from decimal import Decimal
from enum import StrEnum
from typing import TypeAlias

from lamina.data.encode import encodable
from lamina.utils import RepeatedKeyError, parse_json

SEPARATORS = ",;|"  # signs that may stand between the class names in one text
_ERRORS = "#value! #ref! #div/0! #num! #name? #null!"  # of spreadsheets
_MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "none", *_ERRORS.split()})
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_WHOLE = re.compile(r"[-+]?\d+")
# Numbers as spreadsheets show them: with signs between thousands, a comma, a currency or percent.
_COMMA_NUMBER = re.compile(r"[-+]?(\d+,\d+|\d{1,3}(\.\d{3})+,\d+|\d{1,3}(,\d{3})+\.\d+)")
_GROUPED, _MONEY = r"\d{1,3}(?:[,.'\u2019 \xa0\u202f]\d{3})+(?:[.,]\d+)?", "$\xa3\xa5\u20ac\u20b9"
_FORMATTED = re.compile(rf"(?![-+]?\d+(\.\d*)?$)[-+\u2212]?([{_MONEY}] ?)?({_GROUPED}|\d+([.,]\d+)?)( ?[{_MONEY}%])?")
# characters without width, which texts from spreadsheets and web pages carry; many of them are marks of direction
_BLANK = "\u200b-\u200f\u202a-\u202e\u2060\u2066-\u2069\u061c\ufeff\u00ad"
_UNSEEN = re.compile(f"[{_BLANK}\ufe0e\ufe0f]")
_TRIMMED = re.compile(rf"[\s{_BLANK}]*(.*[^\s{_BLANK}])?[\s{_BLANK}]*", re.DOTALL)  # linear in the text's length
# Texts of values that are no names, as Python, NumPy and torch print them: arrays and tensors, lists without commas,
# bytes, numbers, dates, ids, views of dicts and lists of these, dicts, objects and members of enums. A class may be
# written like another call, as "play('x')".
_PRINTED = re.compile(
    r"\[(?=[^\]\d]*\d)[-+.\deE\s]+\]|\[\s*(['\"]).*\1\s*\]|b(['\"]).*\2"
    r"|(?P<list>\[)?((array|tensor|np\.\w*[\d_])\(|(Decimal|UUID)\(['\"]|dict_\w+\(\[|datetime\.\w+\(\d).*\)(?(list)\])"
    r"|\{\s*['\"].*:.*\}|<.* at 0x[\da-fA-F]+>|<\w+\.\w+: .*>",
    re.DOTALL,
)
_EXACT = 1 << 53  # from here on, floats cannot tell two neighbouring class ids apart
_IGNORED = "-100"  # the label that models skip
_LONGEST_LIST = 1 << 16  # characters of a text that is read as a list in Python; JSON may be longer
_SET = re.compile(r"(?:frozen)?set\((.*)\)", re.DOTALL)  # how Python prints empty and frozen sets


class EvaluateOnly(StrEnum):
    """Values of `missing_labels` that only `evaluate` passes; `check_spec` refuses them as plain texts, from users.

    MASK_NULLS: as "mask", but an empty text of a multi-label task means no class, as in training by default.
    """

    MASK_NULLS = "mask_nulls"


# A cell as Python has it: a text, number, bool or None, a list of these, or an object of a type that is no label.
Cell: TypeAlias = object


class LabelCellError(ValueError):
    """Raised when a cell is not a label.

    Attributes:
        got: Description of the cell, without the column's name; the caller adds that.
        rule: Which cells are allowed, and what to do; begins with a comma or semicolon.
    """

    def __init__(self, got: str, rule: str) -> None:
        self.got, self.rule = got, rule
        super().__init__(f"{got}{rule}")


def plain(cell: object) -> Cell:
    """Return a value of NumPy, torch, pandas or Arrow as a Python value; arrays, tuples and sets become lists.

    A member of an enum of texts or numbers becomes its text or number. The entries of a set are sorted. A Decimal
    without a point becomes an int. Any other Decimal becomes a float, unless the float would lose its fraction.
    """
    if cell is None or type(cell) in (str, int, float, bool):
        return cell
    if isinstance(cell, str):
        return str.__str__(cell)  # not str(cell), which is the member's name for an enum
    if isinstance(cell, int | float):
        return int(cell) if isinstance(cell, int) else float(cell)
    if hasattr(cell, "tolist") and hasattr(cell, "dtype"):
        cell = cell.tolist()  # pyright: ignore[reportAttributeAccessIssue]
    elif hasattr(cell, "as_py"):
        cell = cell.as_py()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(cell, Decimal):
        cell = _plain_decimal(cell)
    if isinstance(cell, set | frozenset):
        cell = sorted(cell, key=str)
    return [plain(part) for part in cell] if isinstance(cell, list | tuple) else cell


def _plain_decimal(cell: Decimal) -> int | float | Decimal:
    if not cell.is_finite():
        return cell if cell.is_snan() else float(cell)  # float() refuses sNaN
    is_large = abs(cell) >= _EXACT
    if "." not in f"{cell:f}" or (is_large and cell == int(cell)):
        return int(cell)
    return cell if is_large else float(cell)


def trimmed(text: str) -> str:
    """Return a name in Unicode's form NFC, without spaces and zero-width characters at its ends.

    Lone surrogates, which UTF-8 cannot encode, are replaced.
    """
    return _TRIMMED.sub(r"\1", encodable(unicodedata.normalize("NFC", text)), count=1)


def look(name: str) -> str:
    """Return a form of a class name, equal for names that differ only in case, width, spaces or unseen characters."""
    return " ".join(_UNSEEN.sub("", unicodedata.normalize("NFKC", name)).casefold().split())


def is_missing(cell: object, labels: Collection[str] = (), *, texts: bool = False) -> bool:
    """Return whether a label is missing: None, NaN, blank, or a text such as "NA".

    A list is missing if one of its entries is; an empty list is not.

    Args:
        cell: The cell.
        labels: Class names. They are never missing, even if one of them is "none".
        texts: Whether labels are texts to generate. Then no text is missing unless it is blank.
    """
    cell = plain(cell)
    if isinstance(cell, list):
        return any(is_missing(part, labels, texts=texts) for part in cell)
    if isinstance(cell, str):
        name = trimmed(cell)
        return name.lower() in _MISSING and name not in labels and not (texts and name)
    return str(cell).lower() in _MISSING  # "none", "nan", "<na>" or "nat"


def is_hidden(cell: object) -> bool:
    """Return whether a cell is empty or -1 (also as text), or a list of these, as in test sets with secret labels.

    An empty list does not count.
    """
    cell = plain(cell)
    if isinstance(cell, list):
        return bool(cell) and all(map(is_hidden, cell))
    return is_missing(cell, texts=True) or (isinstance(cell, int | float | str) and str(cell).strip() in ("-1", "-1.0"))


def class_name(cell: object, labels: Collection[str] = ()) -> str:
    """Return the class name in a cell: a text (see `trimmed`), or a whole number or bool as Python prints it.

    So 2 and 2.0 are the class "2", and True is the class "True"; a blank text gives "". A text in `labels` is always a
    name, whatever it looks like. Raises LabelCellError if the cell is something else (None, 1.5), is -100, spells a
    list in JSON or Python, or is printed by Python, NumPy or torch: an array, dict, object, date, bytes and the like.
    """
    cell = plain(cell)
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    name = trimmed(str(cell)) if isinstance(cell, str | int) else ""
    if name not in labels and _is_list(name):
        raise LabelCellError(shown(cell), f", which is a list; a row has one class. {_SEVERAL}")
    if name not in labels and name[-1:] in "])}>'\"" and _PRINTED.fullmatch(name):
        raise LabelCellError(shown(cell), f", which is a printed value; a class is a name. {_NAMES}")
    if name == _IGNORED and name not in labels:
        rule = "models skip this label, so it is not a class. Leave such cells empty"
        raise LabelCellError(shown(cell), f"; {rule}. {_NAMES}")
    if name or isinstance(cell, str):
        return name
    what, hint = _described(cell)
    raise LabelCellError(shown(cell), f", which is {what}; a class is a text, a whole number, or true or false. {hint}")


_SEVERAL = "Set problem_type='multi_label' if rows have several classes."


def _described(cell: Cell) -> tuple[str, str]:
    """Return a phrase for `cell`, which is not a class name, and a sentence that says what a user can do about it."""
    if isinstance(cell, list):
        return "a list", _SEVERAL
    if isinstance(cell, Mapping):
        return "an object with keys", "Name the field that has the class, as in label='label.name'."
    what = f"of type {type(cell).__name__}"
    if isinstance(cell, float | Decimal):
        return what, "Set problem_type='regression' if it is a score."
    return what, f"{'Decode' if isinstance(cell, bytes | bytearray) else 'Convert'} it to a text."


def shown(cell: object) -> str:
    """Return a cell as messages quote it: Python's `repr`, cut to 60 characters."""
    text = repr(cell)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Numbers


def is_number(cell: object) -> bool:
    """Return whether a cell is a number, or a text that is one, with a point before decimals. A bool is not."""
    cell = plain(cell)
    if isinstance(cell, str):
        return _NUMBER.fullmatch(cell.strip()) is not None
    is_snan = isinstance(cell, Decimal) and cell.is_snan()  # float() refuses it
    return isinstance(cell, int | float | Decimal) and not (isinstance(cell, bool) or is_snan)


def number(cell: object) -> float:
    """Return a cell that is a number (see `is_number`) as a float, and NaN for any other cell."""
    return float(str(plain(cell))) if is_number(cell) else math.nan


def is_whole(cell: object) -> bool:
    """Return whether a cell is an int or bool, or a text that is a whole number without a decimal point."""
    cell = plain(cell)
    return isinstance(cell, int) or (isinstance(cell, str) and _WHOLE.fullmatch(cell.strip()) is not None)


def has_decimal_comma(cell: Cell) -> bool:
    """Return whether a cell is a number with a comma, such as "1,5" or "1,234.5", which is hardly a class name."""
    return isinstance(cell, str) and _COMMA_NUMBER.fullmatch(trimmed(cell)) is not None


def is_formatted_number(cell: object) -> bool:
    """Return whether a cell is a text that is a number, but not a plain one: "1,5", "1,234,567", "5%" or "$10"."""
    return isinstance(cell, str) and _FORMATTED.fullmatch(trimmed(cell)) is not None


def is_amount(cell: str) -> bool:
    """Return whether a formatted number is a plain number but for its currency or percent: "5%", but not "1,5"."""
    return is_number(trimmed(cell).lstrip("-+").strip(f"{_MONEY}% "))


# Several classes in one cell


def parts(
    cell: object, separator: str | None = None, labels: Collection[str] = (), *, is_blank_missing: bool = False
) -> list[Cell]:
    """Return the entries of a cell that may have several classes.

    Raises LabelCellError if a text in brackets spells no list (see `spelled_list`), the cell or an entry of its list is
    a mapping, or an entry is a list.

    Args:
        cell: A list; a text that spells one in JSON or Python; or a text with names. A blank text has no class.
            Anything else, such as a number, is the only entry.
        separator: The sign between names in one text. None: a text is one name.
        labels: Class names; a text that is one of them is not divided.
        is_blank_missing: Whether a blank text has None as its only entry, a missing label, and not no class.
    """
    cell = plain(cell)
    if isinstance(cell, str):
        text = trimmed(cell)
        if text in labels:
            return [text]
        if is_blank_missing and not text:
            return [None]
        spelled = spelled_list(text)
        if spelled is None:
            names = [text] if separator is None else text.split(separator)
            return [name for name in names if trimmed(name)]
        cell = plain(spelled)
    if isinstance(cell, Mapping):
        what, hint = _described(cell)
        raise LabelCellError(shown(cell), f", which is {what}; a row has a list of names. {hint}")
    if not isinstance(cell, list):
        return [cell]
    for part in cell:
        if isinstance(part, list | Mapping):
            raise LabelCellError(shown(cell), "; a list of labels holds names, or 0 and 1 per class. Flatten it.")
    return cell


def spelled_list(text: str) -> object:
    """Return the list, tuple or set that a text in brackets spells in JSON or Python; None for any other text.

    Raises LabelCellError in three cases. A text in square brackets spells no list, such as a printed NumPy array, or a
    long list in Python. A text in braces is an object, or has a comma but spells no set, such as an array of Postgres.
    A key comes twice.
    """
    if printed := _SET.fullmatch(text):
        text = printed[1] or "[]"
    if text[:1] + text[-1:] not in ("[]", "()", "{}"):
        return None
    try:
        if text[0] == "[":
            return _json_or_literal(text)
        value = _literal(text)
    except RepeatedKeyError as error:
        raise LabelCellError(shown(text), f", in which {error}; correct it.") from error
    except ValueError:
        rule = 'in JSON, or a short one in Python; write it as in ["art", "sport"], with commas'
        raise LabelCellError(shown(text), f", which is in brackets but not a list {rule}. {_NAMES}") from None
    if value is None and text[0] == "{" and ("," in text or _PRINTED.fullmatch(text)):
        rule = ', which is an object or an array of Postgres; a list is written as in ["art", "sport"]'
        raise LabelCellError(shown(text), f"{rule}. {_NAMES}")
    return value


_NAMES = "If it is a class name, give labels=[...]."


def _json_or_literal(text: str) -> object:
    """Return the list that `text`, in square brackets, spells in JSON or Python; raise ValueError if it spells none."""
    try:
        return parse_json(text)
    except RepeatedKeyError:
        raise
    except ValueError:
        if (value := _literal(text)) is None:
            raise
        return value


def _literal(text: str) -> object:
    """Return the list, tuple or set that a text spells in Python; None if it does not spell one.

    Strings side by side, which Python would join, are no list: NumPy prints ['art' 'sport']. A text of more than 2**16
    characters is no list either. Raises RepeatedKeyError if a dict in the list has a key twice.
    """
    if len(text) > _LONGEST_LIST:
        return None
    try:
        kinds = [token.type for token in tokenize.generate_tokens(io.StringIO(text).readline)]
        if any(pair == (tokenize.STRING, tokenize.STRING) for pair in itertools.pairwise(kinds)):
            return None
        tree = ast.parse(text, mode="eval")
        value = ast.literal_eval(tree)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, tokenize.TokenError):
        return None
    if not isinstance(value, list | tuple | set):
        return None
    for node in ast.walk(tree):
        keys = [ast.unparse(key).strip("'") for key in node.keys if key] if isinstance(node, ast.Dict) else []
        if len(set(keys)) < len(keys):
            raise RepeatedKeyError(keys)
    return value


def _is_list(text: str) -> bool:
    try:
        return spelled_list(text) is not None
    except LabelCellError:
        return False


def has_several(cell: object, labels: Collection[str] = ()) -> bool:
    """Return whether a cell is a list, or a text that spells one and is not a class name in `labels`."""
    cell = plain(cell)
    return isinstance(cell, list) or (isinstance(cell, str) and trimmed(cell) not in labels and _is_list(trimmed(cell)))


def is_flag(part: Cell) -> bool:
    """Return whether an entry of a list is 0 or 1, as a number, a bool or a text."""
    return part in (0, 1) if isinstance(part, int | float) else isinstance(part, str) and part.strip() in ("0", "1")
