"""`lamina demo`: the main job from end to end, with no network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.cli.options import JsonOption
from lamina.cli.output import print_json, print_table

if TYPE_CHECKING:
    from lamina.demo.run import Demo


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the bank, the picture and the corpus.")
    ] = Path("out/demo"),
    rows: Annotated[int, typer.Option("--rows", help="Sentences in the corpus.")] = 3000,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Times through the training part.")] = 6,
    seed: Annotated[int, typer.Option("--seed", help="Of corpus, readers and order.")] = 0,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Train three readers in one pass of a frozen MiniLM and compare them with the usual baselines."""
    from lamina.demo.run import run_demo

    found = run_demo(output, rows=rows, epochs=epochs, seed=seed, progress=progress)
    if as_json:
        print_json({**found.__dict__, "folder": str(found.folder)})
    else:
        _show(found)


def _show(found: Demo) -> None:
    methods = ("last layer + linear", "best single layer", "AdaLayers")
    rows = [(row["task"], row["metric"], *(row[m] for m in methods), row["its layer"]) for row in found.scores]
    columns = ("task", "metric", *methods, "best layer")
    print_table("Test scores: three tasks, one pass of one frozen model", columns, rows)
    for entry in found.predictions:
        print(_sentence(entry))
    timing = found.timing
    print(
        f"One pass over 64 texts: {timing['base_ms']:.0f} ms alone, {timing['with_readers_ms']:.0f} ms with the three "
        f"readers, {timing['ratio']:.2f} x."
    )
    print(f"Saved and loaded again: largest difference of a logit {found.reload_difference}.")
    print(f"Which layers each reader uses: {found.folder / 'importance.png'}")
    print(
        f'Done in {found.seconds:.0f} s. Try: lamina predict {found.folder / "bank"} "The pasta at Luigi\'s was cold."'
    )


def _sentence(entry: dict[str, Any]) -> str:
    spans = ", ".join(f"{span['text']} ({span['label']})" for span in entry["entities"]) or "none"
    return f"  {entry['sentiment']['label']}, {entry['acceptability']['label']}; entities: {spans}"
