"""Runs that are trained each by itself: what tells one from another, and which of their models are kept."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.cells.run_cells import Shelf
from lamina.errors import StoreError
from lamina.recipes.schema import slug
from lamina.store import load, save
from lamina.store.bank_folder import saved_bytes
from lamina.store.files import check_room
from lamina.store.save_model import discard, move
from lamina.train.checkpoint import Checkpoints
from lamina.train.identity import data_digests, reader_settings, starting_weights
from lamina.train.options import FitOptions
from lamina.train.results import sort_key
from lamina.utils import is_dir, rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.cells.run_cells import Cell
    from lamina.recipes.schema import Recipe
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec

_FREE = {"resume", "progress", "tensorboard", "save_steps", "num_workers", "cache_dir"}  # change nothing that is learnt


@dataclass(frozen=True)
class Separate:
    """The folder of a recipe's separate runs, and the scores of those that ended.

    A run has a file in "separate", and beside it, until it has ended, its checkpoints and its model.
    """

    recipe: Recipe
    folder: Path
    specs: Mapping[str, RunSpec]
    tasks: Mapping[str, Sequence[Task]]  # with a copy per repeat
    scores: dict[str, tuple[str, float]] = field(default_factory=dict)  # run -> metric and score

    @property
    def place(self) -> Path:
        """Where the files of runs are."""
        return self.folder / "separate"

    @cached_property
    def _base(self) -> tuple[str, int]:
        """The fingerprint of the model that all runs start from, and its bytes."""
        model, _ = load(self.recipe.model, revision=self.recipe.revision)
        return starting_weights(model, list(model.parameters())), saved_bytes(model)

    @cached_property
    def _shelf(self) -> Shelf:
        return Shelf(self.place, lambda cell: self._identity(cell.name), op="recipe", what="run")

    def begin(self, cells: Iterable[Cell]) -> dict[str, dict[str, Any]]:
        """What the runs gave that ended before and go on; what other runs left behind is cleared.

        Raises:
            ConfigError: If one that goes on was another run.
            StoreError: If its file is damaged, there is no room for the models that are yet to be kept, or something
                else is in the way.
        """
        done = self._shelf.read(cell for cell in cells if self.specs[cell.name].options.get("resume"))
        for name, state in done.items():
            self._note(name, state)
        check_room(self.folder, self._models_left() * self._base[1])
        for name, spec in self.specs.items():
            if name in done or not spec.options.get("resume"):
                self._clear(name)
        return done

    def end(self, cell: Cell, state: dict[str, Any]) -> None:
        """Keep what a run gave; if its model is the best of its task, put it where that is.

        Raises:
            StoreError: If the model is not where its worker wrote it, or the folder cannot be written.
        """
        self._note(cell.name, state)
        if rank() == 0:
            if self.recipe.methods and self.recipe.keep != "none":
                self._keep(cell.name)
            self._shelf.write(cell, state)
        self._clear(cell.name)

    def checkpoints(self, name: str) -> Path:
        """Where the checkpoints of a run are."""
        return self.place / f"{name}.checkpoints"

    def _clear(self, name: str) -> None:
        """Remove the checkpoints of a run, and a model that is not kept."""
        if rank() == 0:
            Checkpoints(self.checkpoints(name), "recipe").clear()
            discard(self._own_model(name))

    def _note(self, name: str, state: Mapping[str, Any]) -> None:
        (row,) = state["rows"]
        self.scores[name] = row["metric"], row["score"]

    def _models_left(self) -> int:
        """How many models are yet to be written, at most, the one that another takes the place of counted too."""
        left = self.specs.keys() - self.scores.keys()
        if not self.recipe.methods or self.recipe.keep == "none" or not left:
            return 0
        if self.recipe.keep == "all":
            return len(left)
        tasks = ({self.specs[name].task for name in names} for names in (left, self.scores))
        return len(set.difference(*tasks)) + 1

    def _is_best(self, name: str, metric: str, score: float) -> bool:
        """Whether no run of its task that ended has a better score; of equals the first in the recipe is the best."""
        own = sort_key(metric, score), self._order[name]
        others = [other for other in self.scores if other != name and self.specs[other].task == self.specs[name].task]
        return all(own < (sort_key(*self.scores[other]), self._order[other]) for other in others)

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.specs)}

    def _own_model(self, name: str) -> Path:
        return self.place / f"{name}.model"

    def _model(self, name: str) -> Path:
        """Where a run writes its model."""
        return self.folder / "models" / name if self.recipe.keep == "all" else self._own_model(name)

    def offer(self, name: str, model: PreTrainedModel, processor: Any, row: Mapping[str, Any]) -> None:
        """Write the model of a run that ended, if it may be kept for all that is known here."""
        keep = self.recipe.keep
        if rank() == 0 and keep != "none" and (keep == "all" or self._is_best(name, row["metric"], row["score"])):
            save(model, self._model(name), processor)

    def _keep(self, name: str) -> None:
        wanted, place = self.recipe.keep == "all" or self._is_best(name, *self.scores[name]), self._model(name)
        if wanted and not is_dir(place):
            hint = "Give an output folder that all workers share, or `keep: none`."
            raise StoreError(f"recipe: the model of {name} is not in {place}, where its worker wrote it. {hint}")
        if wanted and self.recipe.keep == "best":
            move(place, self.folder / "models" / slug(self.specs[name].task))

    def _identity(self, name: str) -> dict[str, Any]:
        """What decides what a run learns, JSON-ready; see `lamina.train.identity`."""
        recipe, spec = self.recipe, self.specs[name]
        task = self.tasks[spec.task][spec.repeat]
        facts = {"model": recipe.model, "revision": recipe.revision, "train_base": recipe.train_base, **spec.settings}
        facts |= {"edits": list(spec.edits), "metric": task.metric, "labels": list(task.labels)}
        facts |= {key: getattr(task, key) for key in ("by_row", "label_all_tokens", "image_size")}
        facts |= FitOptions.of(spec.options).model_dump(exclude=_FREE)
        settings = {"": facts | ({} if spec.reader is None else reader_settings(spec.reader))}
        digests: dict[str, Any] = {"": {"weights of the model": self._base[0]}}
        for part, split in task.splits.items():
            settings[where := f"in the {part} part of '{spec.task}'"] = {"rows": len(split)}
            digests[where] = data_digests(split)
        return json.loads(json.dumps({"settings": settings, "digests": digests}, default=str))
