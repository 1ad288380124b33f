"""How well readers on Whisper's encoder answer three questions about speech, compared with regressions.

    python benchmarks/speech.py --data ../shared/data/fsdd.tar --model FOLDER [--seeds 5] [--epochs 15]
        [--output out/speech] [--figure speech.svg] [--json]

The recordings are those of the Free Spoken Digit Dataset: 3,000 spoken digits by six people, mono, 8 kHz. Its published
split is kept: recordings 0 to 4 of each person and digit are the test part (300). Recordings 5 to 9 (300) choose the
epoch, the layer and the strength of regularisation, and the others (2,400) train. Half of all recordings, drawn with a
fixed seed, get white noise with a signal-to-noise ratio between 10 and 30 dB. The questions are which digit is said,
who says it, and whether the recording was noised.

FOLDER has a Whisper model and its feature extractor. The encoder reads 30 seconds whatever the length of a recording,
so its states are computed once, without those of padding, and kept on disk for all tasks, readers, seeds and runs.
Two readers per task and seed are trained: the default and AdaLayers. The rivals are logistic regressions: on the mean
over frames of the last layer, of the layer that is best on the held-out recordings, of all layers side by side, and on
MFCC (20 coefficients and their differences; mean and standard deviation over each third of the recording). Intervals
(95 %) are bootstrap intervals over the test recordings, of the mean over seeds.
"""

from __future__ import annotations

import argparse
import random
import tarfile
import time
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import pandas as pd
import soundfile
import torch
from common import report
from scipy.fft import dct
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoFeatureExtractor, WhisperModel
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

import lamina
from lamina import AdaLayers, Reader, ReaderBank, Task
from lamina.data.state_cache import CacheSettings, StateMasks, open_states
from lamina.report.chart_files import save_chart
from lamina.report.charts import ON_LIGHT
from lamina.train.bank_runner import BankRunner
from lamina.train.groups import groups_of
from lamina.train.options import PassOptions

if TYPE_CHECKING:
    from lamina.data.state_cache import CachedStates

    Rows = list[dict[str, Any]]
    Array = np.ndarray[Any, Any]

TASKS = ("digit", "speaker", "noised")
READERS = ("default", "AdaLayers")
PARTS = {"test": range(5), "validation": range(5, 10), "train": range(10, 50)}  # numbers of a person's recordings
NOISE_DB = (10, 30)
STRENGTHS = (0.01, 0.1, 1.0, 10.0)  # C of the regressions
RATE, RESAMPLES = 8000, 1000


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="tar file or folder with DIGIT_SPEAKER_NUMBER.wav")
    parser.add_argument("--model", required=True, help="hub id or folder of a Whisper")
    parser.add_argument("--seeds", type=int, default=5, help="runs of the readers (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="of the readers (default %(default)s)")
    parser.add_argument("--limit", type=int, help="recordings of each person and digit, to try it out")
    parser.add_argument("--output", type=Path, default=Path("out/speech"), help="folder of the states and results")
    parser.add_argument("--figure", type=Path, help="file of the figure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def recordings(path: Path) -> dict[str, Array]:
    """Return name -> samples, sorted by name, of the .wav files in a tar file or folder."""
    if path.is_dir():
        files = {file.stem: file.read_bytes() for file in path.glob("*.wav")}
    else:
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.name.endswith(".wav")]
            files = {Path(member.name).stem: archive.extractfile(member).read() for member in members}  # pyright: ignore[reportOptionalMemberAccess]
    return {name: soundfile.read(BytesIO(files[name]), dtype="float32")[0] for name in sorted(files)}


def noised(samples: Array, rng: np.random.Generator) -> Array:
    """Return samples with white noise, whose level is drawn."""
    level = np.sqrt(np.mean(samples**2)) * 10 ** (-rng.uniform(*NOISE_DB) / 20)
    return (samples + rng.normal(0, level, len(samples))).astype(np.float32)


def split(path: Path, limit: int | None) -> dict[str, Rows]:
    """Return part -> rows with "audio" and the label of each task; half of the rows of each part are noised."""
    parts: dict[str, Rows] = {part: [] for part in ("train", "validation", "test")}
    for name, samples in recordings(path).items():
        digit, speaker, number = name.split("_")
        part = next(part for part, numbers in PARTS.items() if int(number) in numbers)
        if limit is None or int(number) - PARTS[part].start < limit:
            parts[part].append({"audio": samples, "digit": digit, "speaker": speaker})
    for at, rows in enumerate(parts.values()):
        drawn, rng = set(random.Random(at).sample(range(len(rows)), len(rows) // 2)), np.random.default_rng(at)
        for number, row in enumerate(rows):
            row["noised"] = "yes" if number in drawn else "no"
            samples = noised(row["audio"], rng) if number in drawn else row["audio"]
            row["audio"] = {"array": samples, "sampling_rate": RATE}
    return parts


def add_readers(bank: ReaderBank, tasks: dict[str, Task], seed: int) -> dict[str, Task]:
    """Add the readers of one seed to a bank, and return their names with the tasks."""
    named = {}
    for what, task in tasks.items():
        default = Reader.default(task)
        for method, fusion in zip(READERS, (default.fusion, AdaLayers(dim=64)), strict=True):
            head = default.head if method == "default" else lamina.AudioClassification(task.labels)
            bank.add(name := f"{what}-{method}-{seed}", Reader(fusion, head, seed=seed))
            named[name] = task
    return named


def kept_states(bank: ReaderBank, named: dict[str, Task], part: str, folder: Path) -> CachedStates:
    """Return the states of a part, which are computed if they are not on disk."""
    settings = PassOptions.checked("speech", batch_size=1)
    (group,) = groups_of(BankRunner(bank, "speech"), named, part, settings)
    cache = CacheSettings(mode="on", folder=folder, batch_size=1, progress=True)
    states = open_states(bank, group.inputs, group.names, settings=cache)
    if states is None:
        raise SystemExit("the states cannot be kept")
    return states


def predictions(bank: ReaderBank, states: CachedStates) -> dict[str, list[str]]:
    """Return reader name -> the label of each row, from kept states."""
    labels: dict[str, list[str]] = {name: [] for name in bank}
    masks, count = StateMasks(states.layout.lengths), len(states.layout.lengths)
    bank.eval()
    for at in range(0, count, 50):
        rows = range(at, min(at + 50, count))
        with torch.no_grad():
            out = bank.read_states(states.batch(rows), masks.batch(rows))
        for name in bank:
            labels[name] += [str(bank[name].config.head.labels[best]) for best in out[name].logits.argmax(-1).tolist()]
    return labels


def layer_means(states: CachedStates) -> Array:
    """Return the mean over frames of each layer of each row `[rows, layers, width]`."""
    means = []
    for row in range(len(states.layout.lengths)):
        (layers,) = states.batch([row]).values()
        means.append(np.stack([state[0].float().mean(0).numpy() for state in layers.values()]))
    return np.stack(means)


def mfcc(samples: Array) -> Array:
    """Return the MFCC of a recording, as one vector: mean and deviation over each third of it."""
    filters = mel_filter_bank(129, 40, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    samples = np.pad(samples, (0, max(0, RATE // 5 - len(samples))))
    how: dict[str, Any] = {"frame_length": 200, "hop_length": 80, "fft_length": 256, "log_mel": "log"}
    mel = spectrogram(samples, window_function(200, "hann"), mel_filters=filters, power=2.0, **how)
    coefficients = np.asarray(dct(mel, axis=0, norm="ortho"))[:20]
    both = np.concatenate([coefficients, np.gradient(coefficients, axis=1)])
    thirds = np.array_split(both, 3, axis=1)
    return np.concatenate([part for third in thirds for part in (third.mean(1), third.std(1))])


def regression(features: dict[str, Array], labels: dict[str, list[str]]) -> tuple[float, Array]:
    """Return the best accuracy on the held-out rows, and which test rows the regression of that strength gets right."""
    best, right = -1.0, np.zeros(0)
    for strength in STRENGTHS:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=500))
        model.fit(features["train"], labels["train"])
        score = float(model.score(features["validation"], labels["validation"]))
        if score > best:
            best, right = score, (model.predict(features["test"]) == np.array(labels["test"])).astype(float)
    return best, right


def regressions(states: dict[str, CachedStates], parts: dict[str, Rows]) -> dict[tuple[str, str], Array]:
    """Return (task, method) -> which test rows are right, for the regressions."""
    means = {part: layer_means(own) for part, own in states.items()}
    sounds = {part: np.stack([mfcc(row["audio"]["array"]) for row in rows]) for part, rows in parts.items()}
    found: dict[tuple[str, str], Array] = {}
    for task in TASKS:
        labels = {part: [row[task] for row in rows] for part, rows in parts.items()}
        layers = range(means["train"].shape[1])
        by_layer = [regression({part: own[:, layer] for part, own in means.items()}, labels) for layer in layers]
        best = max(layers, key=lambda layer: by_layer[layer][0])
        found[task, "regression, last layer"] = by_layer[-1][1]
        found[task, f"regression, best layer ({best})"] = by_layer[best][1]
        flat = {part: own.reshape(len(own), -1) for part, own in means.items()}
        found[task, "regression, all layers"] = regression(flat, labels)[1]
        found[task, "regression, MFCC"] = regression(sounds, labels)[1]
    return found


def row_of(task: str, method: str, runs: list[Array]) -> dict[str, Any]:
    """Return a row of the table: `runs` says for each seed which test recordings are right."""
    right = np.stack(runs)
    rng = np.random.default_rng(0)
    drawn = [right[:, rng.integers(right.shape[1], size=right.shape[1])].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    if right.all():  # nothing to resample, so the exact interval is given
        low = 0.025 ** (1 / right.shape[1])
    spread = float(right.mean(1).std(ddof=1)) if len(runs) > 1 else 0.0
    found = {"task": task, "method": method, "seeds": len(runs), "accuracy": float(right.mean()), "over seeds": spread}
    return {**found, "low": float(low), "high": float(high), "n": right.shape[1]}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the accuracies with their intervals, a panel per task."""
    data = pd.DataFrame(rows).assign(method=lambda table: table["method"].str.replace(r" \(\d+\)", "", regex=True))
    data["kind"] = np.where(data["method"].isin(READERS), "reader", "regression")
    order = list(dict.fromkeys(data["method"]))
    y, scale = alt.Y("method:N", sort=order, title=None), alt.Scale(zero=False)
    colour = alt.Color("kind:N", scale=alt.Scale(domain=["regression", "reader"], range=list(ON_LIGHT[:2])), title=None)
    x = alt.X("accuracy:Q", scale=scale, title="accuracy on 300 recordings", axis=alt.Axis(tickCount=4))
    points = alt.Chart().mark_point(size=70, filled=True).encode(x=x, y=y, color=colour)
    lines = alt.Chart().mark_rule().encode(x=alt.X("low:Q", scale=scale), x2="high:Q", y=y, color=colour)
    panels = alt.layer(lines, points, data=data).properties(width=180, height=150)
    chart = panels.facet(column=alt.Column("task:N", sort=list(TASKS), title=None)).resolve_scale(x="independent")
    save_chart(chart.to_dict(), path, "Three questions about speech, Whisper tiny.en")


def main() -> None:
    """Keep the states, train, score and print."""
    arguments = options()
    parts = split(arguments.data, arguments.limit)
    of = partial(Task.from_dataset, "audio_classification", parts, metric="accuracy")
    tasks = {what: of(label=what) for what in TASKS}
    model = WhisperModel.from_pretrained(arguments.model).float().eval()
    bank = ReaderBank(model, AutoFeatureExtractor.from_pretrained(arguments.model))
    runs = [add_readers(bank, tasks, seed) for seed in range(arguments.seeds)]
    folder, start = arguments.output / "states", time.perf_counter()
    states = {part: kept_states(bank, runs[0], part, folder) for part in parts}
    seconds = {"states s": time.perf_counter() - start}
    start = time.perf_counter()
    how: dict[str, Any] = {"learning_rate": 1e-3, "cache": "on", "cache_dir": folder}
    for seed, named in enumerate(runs):
        lamina.fit(bank, named, epochs=arguments.epochs, batch_size=32, seed=seed, progress=True, **how)
    seconds["training s"] = time.perf_counter() - start
    answers = predictions(bank, states["test"])
    right: dict[tuple[str, str], list[Array]] = {}
    for name in bank:
        task, method, _ = name.split("-")
        said = [answer == row[task] for answer, row in zip(answers[name], parts["test"], strict=True)]
        right.setdefault((task, method), []).append(np.array(said, float))
    right |= {key: [own] for key, own in regressions(states, parts).items()}
    rows = sorted((row_of(*key, own) for key, own in right.items()), key=lambda row: TASKS.index(row["task"]))
    if arguments.figure is not None:
        draw(rows, arguments.figure)
    report(rows, as_json=arguments.json)
    report([{"recordings": sum(map(len, parts.values())), **seconds}], as_json=arguments.json)


if __name__ == "__main__":
    main()
