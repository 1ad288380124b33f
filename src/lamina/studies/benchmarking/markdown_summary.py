"""Write the results of a benchmark as a page of Markdown: the methods over all data sets, and each data set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from lamina.utils import pluralize

if TYPE_CHECKING:
    from lamina.studies.study import Study

Frame: TypeAlias = Any  # a DataFrame of pandas, whose type stubs are narrower than what its methods accept
_TITLES = {
    "point": "point",
    "method": "method",
    "score": "mean AUC",
    "spread": "spread over seeds",
    "rank": "mean rank",
    "behind_by": "the leader is ahead by",
    "interval": "95 % interval",
    "p": "Holm p",
    "counts": "wins / level / losses",
    "seconds": "s to train",
    "bytes": "bytes",
}


def over_sets(study: Study) -> Frame:
    """Return a row per point and method of a benchmark, the best mean first. Points are explained in `_points`.

    Columns: "point" and "method"; "score" (mean AUC), "spread" (mean over the data sets of the standard deviation over
    seeds), "rank" (mean rank), "seconds" and "bytes". The other columns compare the leading method with this one:
    "behind_by", "low", "high", "p", "wins", "level" and "losses".
    """
    table: Frame = study.table
    keys = ["point", "method"]
    mean = table[table["measure"] == "mean"].set_index(keys)[["score", "seconds", "bytes"]]
    rank = table[table["measure"] == "rank"].set_index(keys)["score"].rename("rank")
    scores = table[table["measure"] == "score"]
    spread = scores.groupby([*keys, "set"], dropna=False)["score"].std().groupby(level=[0, 1], dropna=False).mean()
    ahead = table[table["measure"] == "ahead"].drop(columns="method").rename(columns={"against": "method"})
    ahead = ahead.set_index(keys)[["score", "low", "high", "p", "wins", "level", "losses"]]
    joined = mean.join(rank).join(spread.rename("spread")).join(ahead.rename(columns={"score": "behind_by"}))
    return joined.reset_index().sort_values(["point", "score"], ascending=[True, False], ignore_index=True)


def markdown_summary(study: Study) -> str:
    """Return the page: methods over all data sets, conclusions, data sets that failed, and the AUC on each data set."""
    table = over_sets(study)
    rows = [_cells(cast("Mapping[str, object]", row)) for row in table.to_dict("records")]
    used = [name for name in _TITLES if any(row[name] for row in rows)]
    titles = {**_TITLES, "behind_by": _TITLES["behind_by"].replace("the leader", _leader(study))}
    parts = [
        "## Over all sets",
        _table([titles[name] for name in used], [[row[name] for name in used] for row in rows]),
    ]
    parts.append("\n".join(f"- {sentence}" for sentence in study.conclusions))
    failures = study.settings.get("failures") or []
    if failures:
        listed = "\n".join(f"- {_place(failure['key'])}: {failure['error']}" for failure in failures)
        parts.append(f"{pluralize(len(failures), 'cell')} failed:\n\n{listed}")
    wide = study.summary()
    if "point" in wide:
        wide["point"] = [f"{point:g}" for point in wide["point"]]
    cells = [[cell if isinstance(cell, str) else _number(cell) for cell in row] for row in wide.to_numpy().tolist()]
    parts += ["## Every set", _table([str(name) for name in wide.columns], cells)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _leader(study: Study) -> str:
    """Return the name of the method that the others are compared with; "the leader" if points have different ones."""
    table: Frame = study.table
    leaders = table.loc[table["measure"] == "ahead", "method"].unique()
    return str(leaders[0]) if len(leaders) == 1 else "the leader"


def _place(key: Mapping[str, Any]) -> str:
    """Return the set of a failed cell, and its point if it has one."""
    return key["set"] if key["point"] is None else f"{key['set']}, {key['point']:g}"


def _cells(row: Mapping[str, object]) -> dict[str, str]:
    """Return a row of `over_sets` as text: column -> text, "" where a method has no value."""
    value = {name: cell for name, cell in row.items() if not _is_missing(cell)}
    cells = {"point": f"{value['point']:g}" if "point" in value else "", "method": str(value["method"])}
    cells |= {name: _number(value.get(name)) for name in ("score", "spread", "rank", "behind_by")}
    p = cast("float | None", value.get("p"))
    cells["p"] = "< 0.001" if p is not None and p < 0.001 else _number(p)
    cells["seconds"] = _number(value.get("seconds"), 1)
    cells["bytes"] = f"{cast('float', value['bytes']):,.0f}" if "bytes" in value else ""
    cells["interval"] = f"{_number(value['low'])} to {_number(value['high'])}" if "low" in value else ""
    cells["counts"] = f"{value['wins']} / {value['level']} / {value['losses']}" if "wins" in value else ""
    return cells


def _is_missing(cell: object) -> bool:
    import pandas as pd

    return cell is None or cell is pd.NA or (isinstance(cell, float) and math.isnan(cell))


def _number(value: object, decimals: int = 3) -> str:
    return "" if value is None or _is_missing(value) else f"{cast('float', value):.{decimals}f}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
