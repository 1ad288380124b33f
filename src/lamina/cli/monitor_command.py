"""`lamina monitor`: train a monitor that flags bad replies of a model, from a file of labelled replies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from typer import Argument, Exit, Option

from lamina.cli import shared_options as options
from lamina.cli.shared_options import print_json, print_table

if TYPE_CHECKING:
    from lamina.monitors.calibration import Unit

_MODEL = 'Folder or hub id of the model whose replies are watched, or "minilm", which judges finished replies.'
_POSITIVE = "Label of bad replies; always needed. Replies with any other label count as good."
_RATE = (
    "Rate of false alarms that is allowed: a fraction of good replies, or see --per. With the default --confidence the "
    "file needs about 1,196 good replies for 0.01, and 236 for 0.05."
)
_PER = 'Unit of the rate: "reply", or "1000 tokens" for false alarms per thousand tokens of good replies.'
_OUTPUT = "Folder for the bank with the monitor. Default: nothing is saved."
_MESSAGES = "Column of chats whose last message is the reply. Default: a column with a usual name, if there is one."
_SPANS = "Column of the bad spans of each reply. Default: bad replies are bad as a whole."
_ANYWAY = "Save the monitor even if its recall cannot be told from its rate of false alarms."
_SEED = "Seed of the division into parts and of the readers."
_MAX_LENGTH = "Tokens per window. Default: the most that the model allows."


def monitor(  # noqa: PLR0913
    train: Annotated[Path, Argument(metavar="REPLIES", help="File of replies: .jsonl, .csv, .tsv or .parquet.")],
    model: Annotated[str, Option(help=_MODEL)],
    positive: Annotated[str | None, Option(help=_POSITIVE)] = None,
    rate: Annotated[float, Option(help=_RATE)] = 0.01,
    per: Annotated[str, Option(help=_PER)] = "reply",
    confidence: Annotated[float, Option(help="Confidence of the rate and of the intervals.")] = 0.95,
    output: Annotated[Path | None, Option("--output", "-o", help=_OUTPUT)] = None,
    messages: Annotated[str | None, Option(help=_MESSAGES)] = None,
    prompt: Annotated[str | None, Option(help="Column of prompts. Default: one with a usual name.")] = None,
    reply: Annotated[str | None, Option(help="Column of replies. Default: one with a usual name.")] = None,
    label: Annotated[str | None, Option(help="Column of labels. Default: one with a usual name.")] = None,
    spans: Annotated[str | None, Option(help=_SPANS)] = None,
    anyway: Annotated[bool, Option("--anyway", help=_ANYWAY)] = False,
    epochs: Annotated[int, Option(min=1, help="Passes over the training part.")] = 4,
    batch_size: options.BatchSizeOption = 32,
    max_length: Annotated[int | None, Option(min=1, help=_MAX_LENGTH)] = None,
    seed: Annotated[int, Option(min=0, max=(1 << 63) - 1, help=_SEED)] = 0,
    overwrite: options.OverwriteOption = False,
    progress: options.ProgressOption = True,
    as_json: options.JsonOption = False,
) -> None:
    """Train a monitor that flags bad replies while a model writes them, and say what it is worth.

    The replies are divided by prompt into four parts: to train, to choose the best candidate, to find its threshold,
    and to measure its rates. The rate of false alarms holds for other replies of the same kind with the confidence.
    Wrong input ends with one sentence and exit code 2; a useless monitor, which is not written to --output, with 1.

    Example: lamina monitor replies.jsonl --model MODEL --positive bad --rate 0.01 -o out/monitor
    """
    if output is not None:
        options.check_output("monitor", output, overwrite=overwrite)
    from lamina.prediction import monitor as train_monitor

    trained = train_monitor(
        train,
        model=model,
        positive=positive,
        rate=rate,
        per=cast("Unit", per),
        confidence=confidence,
        output=output,
        anyway=anyway,
        progress=progress,
        messages=messages,
        prompt=prompt,
        reply=reply,
        label=label,
        spans=spans,
        epochs=epochs,
        batch_size=batch_size,
        max_length=max_length,
        seed=seed,
    )
    saved = str(output) if output is not None and trained.stored else None
    if as_json:
        facts = {"candidates": trained.candidates, "rows": trained.rows, "tfidf_recall": trained.tfidf_recall}
        useful = {"useful": trained.is_useful, "live": trained.live, "output": saved}
        fields = {key: value for key, value in trained.to_dict().items() if key != "sketch"}  # hundreds of numbers
        longest = None if trained.sketch is None else trained.sketch.longest
        print_json({"monitor": fields, "longest": longest, **facts, **useful})
    else:
        print(", ".join(f"{part}: {count} replies" for part, count in trained.rows.items()))
        rows = [[name, f"{auroc:.3f}"] for name, auroc in list(trained.candidates.items())[:5]]
        print_table("The best candidates on the choosing part", ("reader, aggregation", "AUROC"), rows)
        print(trained.sentences())
        if saved:
            print(f"saved in {saved}; lamina inspect {saved} shows it")
    if output is not None and not saved:
        raise Exit(1)
