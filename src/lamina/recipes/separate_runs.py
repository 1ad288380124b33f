"""The files of runs that each start from a newly loaded model: results, checkpoints and models in the output folder."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.cells.run_cells import Cell, Shelf, State
from lamina.data.state_cache import hash_processor
from lamina.errors import StoreError
from lamina.layers.base_facts import hash_settings
from lamina.recipes.expand import expand_recipe
from lamina.recipes.schema import Recipe, slug
from lamina.store import load, save
from lamina.store.bank_folder import saved_bytes
from lamina.store.files import check_room
from lamina.store.save_model import discard, move
from lamina.train.checkpoint import Checkpoints, data_digests, reader_settings, starting_weights, task_settings
from lamina.train.engine import join_processes
from lamina.train.options import FitOptions
from lamina.train.results import sort_key
from lamina.utils import JSONObject, is_dir, run_in_first

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.recipes.report_file import TableRow
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec

logger = logging.getLogger(__name__)

# options that do not change what a run learns, so that a run may be resumed with other values
_UNCHECKED = {"resume", "progress", "tensorboard", "trackers", "save_steps", "num_workers", "cache_dir"}
_SHOWN = 5  # maximum number of models that a warning names


@dataclass(frozen=True)
class SeparateRuns:
    """The files and scores of a recipe's separate runs. Each of them starts from a newly loaded model.

    The subfolder "separate" has a results file for each finished run. For an unfinished run it has the checkpoints and,
    for a short time after training, the model. Models to keep end up in the subfolder "models".

    Attributes:
        folder: The recipe's output folder.
        specs: All runs by name.
        tasks: Every task, with a copy for each repeat of its subsample.
        scores: Run that ended -> its row of results.
    """

    recipe: Recipe
    folder: Path
    specs: Mapping[str, RunSpec]
    tasks: Mapping[str, Sequence[Task]]
    scores: dict[str, TableRow] = field(default_factory=dict)

    @property
    def place(self) -> Path:
        """The subfolder "separate" of the output folder."""
        return self.folder / "separate"

    @cached_property
    def _base(self) -> tuple[dict[str, str], int]:
        """Digests of the model and the tokenizer from which all runs start, and the bytes of a model that a run saves.

        At first use, the model is loaded for this.
        """
        model, processor = load(self.recipe.model, revision=self.recipe.revision)
        digests = {"weights of the model": starting_weights(model, list(model.parameters()))}
        digests["settings of the model"] = hash_settings(model)
        if processor is not None:
            digests["tokenizer or processor"] = hash_processor(processor)
        return digests, saved_bytes(model)

    @cached_property
    def _shelf(self) -> Shelf:
        return Shelf(self.place, lambda cell: self._identity(cell.name), op="recipe", what="run")

    def begin(self, cells: Iterable[Cell]) -> dict[str, State]:
        """Prepare the output folder and `scores` before the first run; return run name -> results of the runs to skip.

        Runs with the option `resume` are skipped if they have finished; their results (see `_Session.train_one`) are
        read from the folder. Checkpoints and temporary models are removed, unless they belong to interrupted runs that
        will continue. `cells` has the cell of each run. All processes must call this. Raises ConfigError if a run to
        resume had other settings or data, and StoreError if a results file is damaged, or the disk has no room for the
        models that must still be saved. A warning names models of finished runs that the recipe keeps, and that are not
        in the folder.
        """
        join_processes()  # the first one has undone what a dead run left in the folder
        done = self._shelf.read(cell for cell in cells if self.specs[cell.name].options.get("resume"))
        for name, state in {**self._other_parts(), **done}.items():
            self._note_score(name, state)

        def make_room() -> None:
            self._warn_of_missing(done)
            check_room(self.folder, self._models_left() * self._base[1])
            for name, spec in self.specs.items():
                if name in done or not spec.options.get("resume"):
                    self._clear(name)

        run_in_first(make_room)  # all wait, or another one would continue from a checkpoint that the first removes
        return done

    def end(self, cell: Cell, state: State) -> None:
        """Save a finished run's results and, if it is kept, its model; then remove its checkpoints.

        `state` holds the results, from `_Session.train_one`. All processes must call this; the first changes files.
        Raises StoreError if the run's model is missing (its worker wrote it elsewhere) or the folder is not writable.
        """
        self._note_score(cell.name, state)

        def write() -> None:
            if self.recipe.methods and self.recipe.keep != "none":
                self._keep_model(cell.name)
            self._shelf.write(cell, state)
            self._clear(cell.name)

        run_in_first(write)

    def _warn_of_missing(self, done: Iterable[str]) -> None:
        """Log a warning if runs have finished, but their models, which the recipe keeps now, are not in the folder.

        This is so if they were trained with another `keep`. `done` are the names of the runs that are not repeated.
        """
        if not self.recipe.methods or self.recipe.keep == "none":
            return
        wanted = {name: f"the model of {name}" for name in done}
        if self.recipe.keep == "best":
            wanted = {slug(row["task"]): f"a model of '{row['task']}'" for row in self.scores.values()}
        lacking = [what for name, what in wanted.items() if not is_dir(self.folder / "models" / name)]
        if lacking:
            names = ", ".join(lacking[:_SHOWN]) + f" and {len(lacking) - _SHOWN} others" * (len(lacking) > _SHOWN)
            problem = f"the subfolder models lacks {names}, and the runs have finished"
            hint = f"Train without resume to save what `keep: {self.recipe.keep}` asks for"
            logger.warning("recipe: %s. %s.", problem, hint)

    def _other_parts(self) -> dict[str, State]:
        """Return run name -> results of the finished runs that the recipe's key `only` leaves out now.

        An earlier call trained them. With their scores, a new run does not replace a better model of the same task. The
        result is {} without `resume`, for a recipe without methods, and if the recipe keeps all models or none. Raises
        StoreError if a results file is damaged.
        """
        resumed = any(spec.options.get("resume") for spec in self.specs.values())
        if not resumed or not self.recipe.methods or self.recipe.keep != "best":
            return {}
        whole = expand_recipe(self.recipe.model_copy(update={"only": {}}), {})
        paths = {name: self.place / f"{name}.json" for name in whole if name not in self.specs}
        return {name: self._shelf.state(path) for name, path in paths.items() if path.exists()}

    def checkpoints(self, name: str) -> Path:
        """Return the folder of the checkpoints of the run `name`."""
        return self.place / f"{name}.checkpoints"

    def _clear(self, name: str) -> None:
        """Remove the checkpoints and the temporary model of the run `name`."""
        Checkpoints(self.checkpoints(name), "recipe").clear()
        discard(self._temporary_model(name))

    def _note_score(self, name: str, state: State) -> None:
        (self.scores[name],) = state["rows"]

    def _models_left(self) -> int:
        """Return the largest number of further models that will be on the disk at one time.

        It is 0 if all runs are finished, the recipe keeps no models, or it trains readers.
        """
        left = self.specs.keys() - self.scores.keys()
        if not self.recipe.methods or self.recipe.keep == "none" or not left:
            return 0
        if self.recipe.keep == "all":
            return len(left)
        tasks_left, tasks_done = {self.specs[name].task for name in left}, {row["task"] for row in self.scores.values()}
        return len(tasks_left - tasks_done) + 1  # while a better model replaces that of its task, both are there

    def _is_best(self, name: str, metric: str, score: float) -> bool:
        """Return whether `score`, in `metric`, makes the run `name` the best finished run of its task.

        If scores are equal, a run that `only` excludes now wins, else the first run in the recipe's order.
        """
        rank_of_run, task = (sort_key(metric, score), self._order[name]), self.specs[name].task
        others = [(other, row) for other, row in self.scores.items() if other != name and row["task"] == task]
        return all(
            rank_of_run < (sort_key(row["metric"], row["score"]), self._order.get(other, -1)) for other, row in others
        )

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.specs)}

    def _temporary_model(self, name: str) -> Path:
        return self.place / f"{name}.model"

    def _model(self, name: str) -> Path:
        """Return the folder to which the run `name` writes its model: a temporary one, unless all models are kept."""
        return self.folder / "models" / name if self.recipe.keep == "all" else self._temporary_model(name)

    def offer(self, name: str, model: PreTrainedModel, processor: Processor, row: TableRow) -> None:
        """Save the model of a run that was just trained, if the recipe keeps all models or this one may be the best.

        `row` is the run's row of results, with "metric" and "score". Every process that trained the model calls this,
        and the first process saves the model. As it may not know the scores of all other runs, `end` decides later.
        Raises StoreError if the model cannot be saved.
        """

        def write() -> None:
            keep = self.recipe.keep
            if keep != "none" and (keep == "all" or self._is_best(name, row["metric"], row["score"])):
                save(model, self._model(name), processor)

        run_in_first(write)

    def _keep_model(self, name: str) -> None:
        """Move the model of a finished run to "models", in place of an earlier one, if it is the best of its task.

        With `keep: all` every model was written there, and nothing is moved.

        Raises StoreError if a model to keep is not where the process that trained the run should have written it.
        """
        row, place = self.scores[name], self._model(name)
        wanted = self.recipe.keep == "all" or self._is_best(name, row["metric"], row["score"])
        if wanted and not is_dir(place):
            hint = "Give an output folder that all workers share, or `keep: none`."
            raise StoreError(f"recipe: the model of {name} is not in {place}, where its worker wrote it. {hint}")
        if wanted and self.recipe.keep == "best":
            move(place, self.folder / "models" / slug(self.specs[name].task))

    def _identity(self, name: str) -> JSONObject:
        """Return everything that decides what the run `name` learns, JSON-ready.

        It is saved with the run's results, and compared when the run is resumed.
        """
        recipe, spec = self.recipe, self.specs[name]
        task = self.tasks[spec.task][spec.repeat]
        facts = {"model": recipe.model, "revision": recipe.revision, "train_base": recipe.train_base, **spec.settings}
        facts |= {"edits": list(spec.edits), **task_settings(task)}
        facts |= FitOptions.of(spec.options).model_dump(exclude=_UNCHECKED)
        settings = {"": facts | ({} if spec.reader is None else reader_settings(spec.reader))}
        digests = {"": self._base[0]}
        for part, split in task.splits.items():
            where = f"in the {part} part of '{spec.task}'"
            settings[where] = {"rows": len(split)}
            digests[where] = data_digests(split)
        return json.loads(json.dumps({"settings": settings, "digests": digests}, default=str))
