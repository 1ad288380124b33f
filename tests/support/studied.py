"""Studies made up for tests of reports."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from lamina.studies.study import Figure, Study

EVIL = "<script>document.title='hurt'</script><img src=x onerror=\"document.title='hurt'\">"


def probe(*, tasks: int = 2, seeds: int = 3, layers: int = 4, task: str = "film") -> Study:
    """Scores that rise by .1 a layer and by .01 a seed, of two probes; every kind of figure is there."""
    rows = [
        {
            "task": task if number == 0 else f"task {number}",
            "layer": layer,
            "probe": name,
            "seed": seed,
            "rows": 872,
            "score": 0.3 + 0.1 * layer + 0.01 * seed + 0.05 * (name == "mlp"),
        }
        for number in range(tasks)
        for layer in range(layers)
        for name in ("linear", "mlp")
        for seed in range(seeds)
    ]
    figures = {
        "by layer": Figure(
            "line", x="layer", colour="probe", facet="task", title="Probes", value_title="accuracy", note="Read on top."
        ),
        "tasks": Figure("bar", x="task", colour="probe", where={"layer": 1}, title="Tasks at layer 1"),
        "layers": Figure("bar", x="layer", where={"probe": "mlp"}, title="Layers"),
        "map": Figure("heat", x="layer", y="task", where={"probe": "linear"}, title="Map"),
        "points": Figure("scatter", x="layer", colour="task", title="All"),
    }
    settings = {"epochs": 3, "models": {"model": {"name": "tiny"}}, "layers": list(range(layers)), "text": None}
    return Study("probe", pd.DataFrame(rows), settings, figures, (f"{task}: read at layer 3.", "The rest is noise."))


def wrong_answers() -> Study:
    """Examples of errors as `studies.errors` lists them, with labels, spans and numbers, some of which want to run."""
    span = {"start": 0, "end": 4, "label": "PER", "error": "missed"}
    extra = {"start": 11, "end": 15, "label": "LOC", "error": "extra"}
    common = {"task": "film", "layer": 1, "measure": "error", "rows": 1}
    rows = [
        {**common, "metric": "confidence", "score": 0.98, "row": 7, "text": EVIL, "true": "bad", "predicted": "good"},
        {
            **common,
            "metric": "confidence",
            "score": 0.5,
            "row": 9,
            "text": "Anna lives here",
            "true": json.dumps([span]),
            "predicted": json.dumps([extra]),
        },
        {**common, "metric": "error", "score": 1.25, "row": 3, "text": "how good", "true": "2.0", "predicted": "0.75"},
    ]
    return Study("errors", pd.DataFrame(rows), {"task": EVIL})


def saved(study: Study, folder: Path) -> Path:
    """The folder of a study."""
    study.save(folder)
    return folder
