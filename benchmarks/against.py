"""Is this tree slower than another? Every benchmark in both checkouts, in turn; the ratio of what they measured.

    python benchmarks/against.py CHECKOUT [--only marginal_cost sweep] [--rounds 3] [--repeats N] [--json]

CHECKOUT is a working tree of another commit (`git worktree add`). Each benchmark runs in a process of its own and
imports `lamina` from the `src` beside it; the two trees take turns, round after round. `ratio` is the median over the
rounds of this tree's seconds or MiB over the other's, `from` and `to` its range. The rows of the base
alone come first: they say how noisy the machine was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import report

HERE = Path(__file__).resolve().parents[1]
NOT_TIMED = ("against", "common", "few_shot", "frontier", "rivals")
UNITS = ("s", "ms", "seconds", "MiB")
Row = tuple[str, str]


def options() -> argparse.Namespace:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="working tree of the other commit")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these benchmarks (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is run in both trees (default 3)")
    parser.add_argument("--repeats", type=int, help="handed on to each benchmark")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    names = sorted(path.stem for path in (HERE / "benchmarks").glob("*.py") if path.stem not in NOT_TIMED)
    asked.only = asked.only or names
    for name in asked.only:
        if not (asked.checkout / "benchmarks" / f"{name}.py").is_file():
            parser.error(f"{asked.checkout} has no benchmark '{name}'; here there are {', '.join(names)}")
    return asked


def measured(tree: Path, name: str, repeats: int | None) -> dict[Row, float]:
    """Run one benchmark once: (what the row is of, which column) -> seconds or MiB."""
    command = [sys.executable, str(tree / "benchmarks" / f"{name}.py"), "--json"]
    command += [] if repeats is None else ["--repeats", str(repeats)]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout.strip()
    values: dict[Row, float] = {}
    while text:
        rows, end = json.JSONDecoder().raw_decode(text)
        text = text[end:].strip()
        for row in rows:
            named = [str(cell) for column, cell in row.items() if isinstance(cell, str | int) and column != "budget"]
            columns = [column for column in row if column.split(" ")[-1] in UNITS]
            values |= {(" ".join(named), column): float(row[column]) for column in columns}
    return values


def main() -> None:
    """Measure and print."""
    asked = options()
    table: list[dict[str, Any]] = []
    for name in asked.only:
        rounds = []
        for _ in range(asked.rounds):
            rounds.append([measured(tree, name, asked.repeats) for tree in (asked.checkout.resolve(), HERE)])
            print(f"{name}: round {len(rounds)} of {asked.rounds}", file=sys.stderr)
        for row in rounds[0][1]:
            ratios = [now[row] / before[row] for before, now in rounds if row in before]
            if ratios:
                key, column = row
                cells = {"benchmark": name, "row": key, "column": column, "ratio": statistics.median(ratios)}
                table.append({**cells, "from": min(ratios), "to": max(ratios)})
    report(table, as_json=asked.json)


if __name__ == "__main__":
    main()
