"""`lamina demo`: train readers for three tasks in one pass of a small model, offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from lamina.cli import shared_options as options
from lamina.cli.shared_options import print_json, print_table

if TYPE_CHECKING:
    from lamina.demo.run import Demo, Prediction

_OUTPUT = "Output folder for the bank, the picture and the corpus."
_ROWS = "Number of sentences in the corpus. Default: 6,500, or 20,000 with --full."
_SEED = "Seed of the corpus, of the readers and of the order of rows."
_SENTENCES = (
    "Tab-separated file of handwritten sentence pairs to add to the corpus. Default: only sentences from templates."
)
_FULL = "Also train a reader on every single layer, with 20,000 sentences. Takes 3 to 4 times as long."


def demo(  # noqa: PLR0913
    output: Annotated[Path, Option("--output", "-o", help=_OUTPUT)] = Path("out/demo"),
    rows: Annotated[int | None, Option(min=48, help=_ROWS)] = None,
    epochs: Annotated[int, Option(min=1, help="Number of passes over the training split.")] = 6,
    seed: Annotated[int, Option(min=0, max=(1 << 63) - 1, help=_SEED)] = 0,
    full: Annotated[bool, Option("--full", help=_FULL)] = False,
    sentences: Annotated[Path | None, Option(help=_SENTENCES)] = None,
    overwrite: options.OverwriteOption = False,
    progress: options.ProgressOption = True,
    as_json: options.JsonOption = False,
) -> None:
    """Train readers for three tasks in one pass of a frozen MiniLM, and compare them with the last layer alone.

    Takes one to two minutes on two CPU cores and needs no network. It ends with answers on five sentences, the time of
    a pass with and without readers, a picture, and commands to try next. Wrong input ends with one sentence and exit
    code 2.
    """
    options.check_output(
        "demo", output, overwrite=overwrite, replaced=("bank", "corpus", "importance.png", "layers.png")
    )
    from lamina.demo.run import run_demo

    result = run_demo(output, rows=rows, epochs=epochs, seed=seed, full=full, sentences=sentences, progress=progress)
    print_json(result) if as_json else _show(result)


def _show(result: Demo) -> None:
    full = bool(result.layers)
    columns = ["task", "metric", "last layer + linear", *(["best single layer"] if full else []), "default reader"]
    rows: list[list[object]] = []
    for row in result.scores:
        single = [f"{row['best_single_layer']:.3f} (layer {row['best_layer']})"] if full else []
        rows.append([row["task"], row["metric"], row["last_layer"], *single, row["default_reader"]])
    print_table("Test scores: three tasks solved in one pass of one frozen model", columns, rows)
    print("\nAnswers on five new sentences:")
    for entry in result.predictions:
        print(_sentence(entry))
    timing, bank = result.timing, result.folder / "bank"
    print(
        f"\nOne pass over 64 texts takes {timing['base_ms']:.0f} ms without readers, "
        f"and {timing['with_readers_ms']:.0f} ms with three: {timing['ratio']:.2f} x."
    )
    content = "the score of each single layer" if full else "which layers each reader uses"
    print(f"Picture ({content}): {result.picture}")
    print(f"Done in {result.seconds:.0f} s. The saved readers: {bank}\n\nTry next:")
    print(f'  lamina predict {bank} "The pasta at Luigi\'s was cold."')
    print(f"  lamina evaluate {bank} --task sentiment={result.folder}/corpus/test.jsonl --text text --label sentiment")
    print(f"  lamina serve {bank}    # needs: pip install 'lamina[serve]'")


def _sentence(entry: Prediction) -> str:
    entities = ", ".join(entry["entities"]) or "none"
    wrong = f"   <- wrong: it is {', '.join(entry['wrong'])}" if entry["wrong"] else ""
    return f"  {entry['text']} -> {entry['sentiment']}, {entry['acceptability']}; entities: {entities}{wrong}"
