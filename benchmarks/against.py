"""Compare the speed of this checkout with another one: run every benchmark in both, in turn, and print the ratios.

    python benchmarks/against.py CHECKOUT [--only marginal_cost sweep] [--rounds 3] [--repeats N] [--json]

CHECKOUT is a working tree of another commit (`git worktree add`). Each benchmark runs in its own process and imports
`lamina` from the `src` beside it. The two checkouts take turns, round after round. `ratio` is the seconds or MiB of
this checkout divided by those of the other one, as the median over the rounds; `from` and `to` are the lowest and the
highest ratio. Many benchmarks also measure the base model alone: its rows show how noisy the machine was.
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
NOT_TIMED = ("against", "common", "few_shot", "frontier", "operations", "rivals")
UNITS = ("s", "ms", "seconds", "MiB")
Row = tuple[str, str]


def options() -> argparse.Namespace:
    """Parse the command line; an unknown benchmark ends the process with an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="working tree of the other commit")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of the benchmarks to run (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each benchmark per checkout (default 3)")
    parser.add_argument("--repeats", type=int, help="--repeats of each benchmark (default: its own)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    names = sorted(path.stem for path in (HERE / "benchmarks").glob("*.py") if path.stem not in NOT_TIMED)
    arguments.only = arguments.only or names
    for name in arguments.only:
        if not (arguments.checkout / "benchmarks" / f"{name}.py").is_file():
            parser.error(f"{arguments.checkout} has no benchmark '{name}'; known here: {', '.join(names)}")
    return arguments


def measured(tree: Path, name: str, repeats: int | None) -> dict[Row, float]:
    """Run one benchmark once and return what it measured.

    Args:
        tree: The checkout.
        name: Name of the benchmark.
        repeats: Its --repeats. None: its default.

    Returns:
        (texts and integers of a row, name of a column) -> seconds, milliseconds or MiB.
    """
    command = [sys.executable, str(tree / "benchmarks" / f"{name}.py"), "--json"]
    command += [] if repeats is None else ["--repeats", str(repeats)]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout.strip()
    values: dict[Row, float] = {}
    while text:
        rows, end = json.JSONDecoder().raw_decode(text)
        text = text[end:].strip()
        for row in rows:
            labels = [str(cell) for column, cell in row.items() if isinstance(cell, str | int) and column != "budget"]
            columns = [column for column in row if column.split(" ")[-1] in UNITS]
            values |= {(" ".join(labels), column): float(row[column]) for column in columns}
    return values


def main() -> None:
    """Run the benchmarks in both checkouts and print the ratios."""
    arguments = options()
    table: list[dict[str, Any]] = []
    for name in arguments.only:
        rounds = []
        for _ in range(arguments.rounds):
            rounds.append([measured(tree, name, arguments.repeats) for tree in (arguments.checkout.resolve(), HERE)])
            print(f"{name}: round {len(rounds)} of {arguments.rounds}", file=sys.stderr)
        for row in rounds[0][1]:
            ratios = [now[row] / before[row] for before, now in rounds if row in before]
            if ratios:
                key, column = row
                cells = {"benchmark": name, "row": key, "column": column, "ratio": statistics.median(ratios)}
                table.append({**cells, "from": min(ratios), "to": max(ratios)})
    report(table, as_json=arguments.json)


if __name__ == "__main__":
    main()
