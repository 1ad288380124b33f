"""Search for a better default reader on 40 of the 113 probing sets; the other 73 are for one confirming run.

    python benchmarks/default_search.py --data FOLDER [--rows 64 1024 | --share .1] [--sets 7 26] [--max-length 128]
        [--candidates default "rate 3e-3"] [--seeds 0] [--cache FOLDER] [--output out/default-search] [--json]

FOLDER holds the package sae-probes 0.4.2 (`pip download --no-deps`, unpacked). The 40 sets are drawn by a fixed
seed. Each candidate is trained as `LaminaClassifier` trains its reader, except for what its name says, on MiniLM's
states, which each set computes once. Two regressions run beside them. Some candidates need more than other settings:

    mean                 every layer's tokens are averaged; no query is learned
    mean beside query    the mean of the tokens beside what the query reads, and one projection of both
    max beside query     the same with the maximum over the tokens; so for "mean and max beside query"
    max, first token, last token    this vector of each layer; no query is learned. MiniLM's first token is [CLS], its
                         last [SEP]; both count in every mean and maximum
    norm with weights    each layer's norm has a weight and a bias per dimension
    linear skip          the head also gets all layers' means, after a norm and divided by 10
    skip with L2         the head also gets one linear function of all layers' means, whose weights have a penalty
                         (their halved squared length times 0.01 is added to the loss); the head's weight has none
    half the epochs      as many passes over the rows; so for "twice the epochs" and "4 times the epochs", and with
                         "max beside query"
    3 readers            the log odds of the default with the seeds 0, 1 and 2, averaged
    with the regression  the log odds of the default plus those of all_layers, each divided by their deviation
    balanced weights     each class has the same weight in the loss; "root weights": the square root of these weights.
                         Both run with --share only, since otherwise the classes are equally frequent

Each pair of set and number of rows is saved when it ends, and the same command continues an interrupted run. Columns:

    mean AUC       mean over the sets that have ended, each scored on at most 500 rows
    above default  the same minus that of today's default
    wins, losses   sets on which the candidate is more than .005 above or below the default

`lamina bench probes --sets ...` with the numbers that `--confirm` prints is the confirming run.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from common import report
from scipy.special import logit
from torch import nn
from torch.nn import functional as F

import lamina
from lamina import PooledLayers, Reader, SequenceClassification
from lamina.fusion.base import Fusion, FusionConfig, dropout
from lamina.layers.preserve import preserve_training
from lamina.studies.benchmarking.benchmark import LEVEL
from lamina.studies.benchmarking.benchmark_cell import CellSettings, ReaderOf, States, cell_portion
from lamina.studies.benchmarking.probing_sets import MOST_TRAINED, find_data, set_names
from lamina.studies.benchmarking.regressions import auc
from lamina.studies.runner import Cell, run_cells
from lamina.train.plan import usual_epochs

if TYPE_CHECKING:
    from torch import Tensor

    from lamina import Task
    from lamina.layers.selectors import Selector
    from lamina.tasks.class_results import ClassResults

SEED, SEARCHED = 38, 40
RIVALS = ("embedding", "all_layers")
AVERAGED, SUMMED = "3 readers", "with the regression"
SKIPPED = 0.1  # factor of the means that the head gets
PENALTY = 0.01
BATCH = 32  # rows per batch of `LaminaClassifier`
MAX_HALF = "max beside query, half the epochs"
EPOCHS = {"half the epochs": 0.5, "twice the epochs": 2, "4 times the epochs": 4, MAX_HALF: 0.5}


@dataclass(frozen=True)
class OtherPooling(FusionConfig):
    """`PooledLayers` with other vectors of each layer.

    With `affine`, each layer's norm has weights. With `skip`, the layers' means are features too, or one linear
    function of them with a penalty.
    """

    vectors: tuple[Literal["query", "mean", "max", "first", "last"], ...] = ("query",)
    affine: bool = False
    skip: Literal["no", "means", "one"] = "no"
    dim: int = 64
    dropout: float = 0.1
    layers: Selector = "all"


class OtherPoolingFusion(Fusion, config=OtherPooling):
    """The module of `OtherPooling`; its parameters start as those of `PooledLayers` do."""

    def __init__(self, config: OtherPooling, *, layers: int, width: int) -> None:
        skipped = {"no": 0, "means": layers * width, "one": 1}[config.skip]
        super().__init__(config, layers=layers, width=width, dim=config.dim + skipped)
        self.queries = nn.Parameter(torch.zeros(layers, width))
        self.projection = nn.Parameter(torch.empty(layers, config.dim, len(config.vectors) * width))
        for weight in self.projection:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        self.scores = nn.Parameter(torch.zeros(layers))
        if config.affine:
            self.scale, self.shift = nn.Parameter(torch.ones(layers, width)), nn.Parameter(torch.zeros(layers, width))
        if config.skip == "one":
            self.skip = nn.Parameter(torch.zeros(layers * width))
            self.skip.register_hook(lambda gradient: gradient + PENALTY * self.skip.detach())

    def fuse(self, states: dict[int, Tensor], mask: Tensor) -> Tensor:
        """Return the same features for each token."""
        normed = torch.stack([F.layer_norm(states[index], states[index].shape[-1:]) for index in range(self.layers)])
        if self.config.affine:
            normed = normed * self.scale[:, None, None] + self.shift[:, None, None]
        pooled = {name: self._pooled(name, normed, mask) for name in self.config.vectors}
        features = torch.cat([pooled[name] for name in self.config.vectors], dim=-1) @ self.projection.mT
        features = F.gelu(F.layer_norm(features, features.shape[-1:]))
        if self.training:
            features = dropout(features, self.config.dropout, [self.generator] * self.layers)
        mixed = torch.einsum("l,lbd->bd", self.scores.softmax(0), features)
        if self.config.skip != "no":
            means = self._pooled("mean", normed, mask).movedim(0, 1).flatten(1)
            skipped = SKIPPED * means if self.config.skip == "means" else (means @ self.skip).unsqueeze(1)
            mixed = torch.cat([mixed, skipped], dim=-1)
        return mixed.unsqueeze(1).expand(-1, mask.shape[1], -1)

    def _pooled(self, vector: str, normed: Tensor, mask: Tensor) -> Tensor:
        """Return one vector of each text and layer, `[layers, batch, width]`; `normed` has all tokens."""
        if vector == "max":
            return normed.masked_fill(~mask.unsqueeze(-1), -math.inf).amax(2)
        if vector == "query":
            scores = torch.bmm(normed.flatten(1, 2), self.queries.unsqueeze(2)).view(normed.shape[:3])
            shares = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
        elif vector == "mean":
            shares = (mask / mask.sum(1, keepdim=True)).expand(self.layers, *mask.shape)
        else:
            places = torch.arange(mask.shape[1], device=mask.device)
            place = 0 if vector == "first" else (places * mask).argmax(1, keepdim=True)
            shares = (places == place).to(normed.dtype).expand(self.layers, *mask.shape)
        return (shares.unsqueeze(2) @ normed).squeeze(2)


def _with(fusion: FusionConfig) -> ReaderOf:
    """Return a function that makes the default reader with another fusion."""
    return lambda task, seed: Reader(fusion, SequenceClassification(task.labels, pooling="first"), seed=seed)


def _weighted(power: float) -> ReaderOf:
    """Return a function that makes the default reader with weights of the classes in its loss.

    The weight of a class is (rows / classes / rows of the class) ** power.
    """

    def make(task: Task, seed: int) -> Reader:
        counts = np.bincount(task.split("train").labels, minlength=2)
        weights = (counts.sum() / 2 / counts) ** power
        head = SequenceClassification(task.labels, pooling="first", class_weights=tuple(weights.tolist()))
        return Reader(PooledLayers(), head, seed=seed)

    return make


CANDIDATES: dict[str, tuple[ReaderOf, dict[str, Any]]] = {  # name -> its reader, and options of the training
    "default": (_with(PooledLayers()), {}),
    "rate 3e-3": (_with(PooledLayers()), {"learning_rate": 3e-3}),
    "rate 1e-2": (_with(PooledLayers()), {"learning_rate": 1e-2}),
    "decay 0.1": (_with(PooledLayers()), {"weight_decay": 0.1}),
    "dropout 0.3": (_with(PooledLayers(dropout=0.3)), {}),
    "4 queries": (_with(PooledLayers(queries=4)), {}),
    "4 heads": (_with(PooledLayers(heads=4)), {}),
    "dim 16": (_with(PooledLayers(dim=16)), {}),
    "dim 256": (_with(PooledLayers(dim=256)), {}),
    "last layer": (_with(PooledLayers(layers=-1)), {}),
    "mean": (_with(OtherPooling(("mean",))), {}),
    "mean beside query": (_with(OtherPooling(("query", "mean"))), {}),
    "max beside query": (_with(OtherPooling(("query", "max"))), {}),
    "max": (_with(OtherPooling(("max",))), {}),
    "first token": (_with(OtherPooling(("first",))), {}),
    "last token": (_with(OtherPooling(("last",))), {}),
    "norm with weights": (_with(OtherPooling(affine=True)), {}),
    "linear skip": (_with(OtherPooling(skip="means")), {}),
    "skip with L2": (_with(OtherPooling(skip="one")), {}),
    "mean and max beside query": (_with(OtherPooling(("query", "mean", "max"))), {}),
    **dict.fromkeys(EPOCHS, (_with(PooledLayers()), {})),
    MAX_HALF: (_with(OtherPooling(("query", "max"))), {}),
    "balanced weights": (_weighted(1), {}),
    "root weights": (_weighted(0.5), {}),
}
WEIGHTED = ("balanced weights", "root weights")
ALL = (*CANDIDATES, AVERAGED, SUMMED)


def main() -> None:
    """Run the cells that have not ended yet, and print a row per number of training rows and method."""
    arguments = _options()
    if arguments.share is not None:
        arguments.rows = [MOST_TRAINED]
    arguments.candidates = arguments.candidates or [
        name for name in ALL if arguments.share is not None or name not in WEIGHTED
    ]
    arguments.candidates = list(dict.fromkeys(["default", *arguments.candidates]))  # the others are compared with it
    folder = find_data(arguments.data)
    searched, confirming = divided(folder)
    if arguments.confirm:
        print(" ".join(f"--sets {name.partition('_')[0]}" for name in confirming))
        return
    searched = [name for name in searched if not arguments.sets or name.partition("_")[0] in arguments.sets]
    model, tokenizer = lamina.load("minilm")
    cells = [
        Cell({"set": name, "rows": rows}, partial(_cell, arguments, model, tokenizer, folder, name, rows))
        for name in searched
        for rows in arguments.rows
    ]
    settings: dict[str, Any] = {"seeds": arguments.seeds, "max_length": arguments.max_length}
    settings |= {"candidates": arguments.candidates, "share": arguments.share}
    done: Any = run_cells(cells, settings=settings, output=arguments.output, resume=True, progress=False)
    table, failures = done
    for failure in failures:
        print(f"failed: {dict(failure.key)}: {failure.error}")
    rows: list[dict[str, Any]] = []
    for size in arguments.rows if len(table) else ():
        wide = table[table["rows"] == size].pivot_table("score", "set", "method", sort=False)
        for method in wide.mean().sort_values(ascending=False).index:
            apart = wide[method] - wide["default"]
            row = {"rows": size, "method": method, "sets": len(wide), "mean AUC": float(wide[method].mean())}
            row |= {"above default": float(apart.mean()), "wins": int((apart > LEVEL).sum())}
            rows.append({**row, "losses": int((apart < -LEVEL).sum())})
    report(rows, as_json=arguments.json)


def divided(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the 40 sets to search on, and of the 73 others. `folder` holds the data."""
    names = set_names(folder)
    order = [names[number] for number in np.random.default_rng(SEED).permutation(len(names))]
    return order[:SEARCHED], order[SEARCHED:]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the package sae-probes")
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 1024], help="training rows (default %(default)s)")
    parser.add_argument("--share", type=float, help="share of class 1 among at most 1,024 rows (default: half)")
    parser.add_argument("--sets", nargs="+", help="numbers of sets among the 40 (default: all)")
    parser.add_argument("--max-length", type=int, default=128, help="maximum tokens per text (default %(default)s)")
    parser.add_argument("--candidates", nargs="+", choices=ALL, help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of the readers (default %(default)s)")
    parser.add_argument("--cache", type=Path, help="folder that keeps the states for later runs (default: none)")
    parser.add_argument("--output", type=Path, default=Path("out/default-search"), help="folder for finished cells")
    parser.add_argument("--confirm", action="store_true", help="print the other 73 sets as options, and run nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def _cell(
    arguments: argparse.Namespace, model: Any, tokenizer: Any, folder: Path, name: str, rows: int
) -> list[dict[str, Any]]:
    """Return a row per method: "method" and "score" (AUC, the mean over seeds).

    The model reads the texts once, although candidates with other options of the training run apart.
    """
    setting, point = ("scarce", rows) if arguments.share is None else ("imbalance", arguments.share)
    settings = CellSettings(setting, (), tuple(arguments.seeds), max_length=arguments.max_length)
    drawn = cell_portion(folder, name, None if setting == "scarce" and rows >= MOST_TRAINED else point, settings)
    truths = drawn.test.labels
    with TemporaryDirectory() as temporary, preserve_training(model):

        def states(seeds: tuple[int, ...], training: dict[str, Any]) -> States:
            changed = replace(settings, seeds=seeds, training=training)
            return States(model, tokenizer, drawn, changed, arguments.cache or temporary)

        usual = states((), {})
        regression = {rival: usual.fitted(rival)[0].scores for rival in RIVALS}
        scores = {rival: auc(truths, chances) for rival, chances in regression.items()}
        odds: dict[str, np.ndarray] = {}
        for candidate in arguments.candidates:  # "default" is the first
            if candidate in CANDIDATES:
                make, training = CANDIDATES[candidate]
                if times := EPOCHS.get(candidate):
                    training = {"epochs": max(1, round(times * usual_epochs(len(drawn.train.texts), BATCH)))}
                odds[candidate] = _log_odds(states(settings.seeds, training), make)
            elif candidate == AVERAGED:
                odds[candidate] = _log_odds(states((0, 1, 2), {}), CANDIDATES["default"][0]).mean(0, keepdims=True)
            else:
                own, other = odds["default"], logit(regression["all_layers"].astype(float).clip(1e-9, 1 - 1e-9))
                odds[candidate] = own / own.std(1, keepdims=True) + other / other.std()
        scores |= {name: float(np.mean([auc(truths, seed) for seed in of_name])) for name, of_name in odds.items()}
    return [{"method": method, "score": score} for method, score in scores.items()]


def _log_odds(states: States, make: ReaderOf) -> np.ndarray:
    """Train one reader per seed; return the log odds of class 1 on the test rows, `[seeds, rows]`."""
    logits = [cast("ClassResults", reader.results).logits for reader in states.trained(make).values()]
    return np.stack([(of_seed[:, 1] - of_seed[:, 0]).numpy() for of_seed in logits])


if __name__ == "__main__":
    main()
