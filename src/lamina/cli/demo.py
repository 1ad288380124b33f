"""`lamina demo`: the main job from end to end, with no network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from lamina.cli.output import print_json, print_table
from lamina.cli.shared_options import JsonOption

if TYPE_CHECKING:
    from lamina.demo.run import Demo

_OUTPUT = "Folder for the bank, the picture and the corpus."


def demo(
    output: Annotated[Path, Option("--output", "-o", help=_OUTPUT)] = Path("out/demo"),
    rows: Annotated[int, Option(min=48, help="Sentences in the corpus.")] = 20_000,
    epochs: Annotated[int, Option(min=1, help="Times through the training part.")] = 4,
    seed: Annotated[int, Option(min=0, help="Of corpus, readers and order.")] = 0,
    progress: Annotated[bool, Option(help="Show a progress bar.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Train three readers in one pass of a frozen MiniLM and compare them with the usual baselines."""
    from lamina.demo.run import run_demo

    result = run_demo(output, rows=rows, epochs=epochs, seed=seed, progress=progress)
    print_json(result) if as_json else _show(result)


def _show(result: Demo) -> None:
    methods = ("last layer + linear", "best single layer", "default reader")
    rows = [(row["task"], row["metric"], *(row[m] for m in methods), row["its layer"]) for row in result.scores]
    columns = ("task", "metric", *methods, "best layer")
    print_table("Test scores: three tasks, one pass of one frozen model", columns, rows)
    for entry in result.predictions:
        print(_sentence(entry))
    timing = result.timing
    print(
        f"One pass over 64 texts: {timing['base_ms']:.0f} ms alone, {timing['with_readers_ms']:.0f} ms with the three "
        f"readers, {timing['ratio']:.2f} x."
    )
    print(f"Saved and loaded again: largest difference of a logit {result.reload_difference}.")
    print(f"What each layer gives for each task: {result.picture}")
    bank = result.folder / "bank"
    print(f'Done in {result.seconds:.0f} s. Try: lamina predict {bank} "The pasta at Luigi\'s was cold."')


def _sentence(entry: dict[str, Any]) -> str:
    spans = ", ".join(f"{span['text']} ({span['label']})" for span in entry["entities"]) or "none"
    return f"  {entry['text']} -> {entry['sentiment']['label']}, {entry['acceptability']['label']}; entities: {spans}"
