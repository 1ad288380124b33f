"""Add, replace and remove readers while a server runs."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, final

from starlette.concurrency import run_in_threadpool

from lamina.bank import ReaderBank
from lamina.errors import ConfigError, LaminaError, NotFiniteError, UnknownNameError, convert_errors
from lamina.layers.nan_checks import first_non_finite
from lamina.serve.middleware import ADMIN
from lamina.serve.scheduler import Scheduler, ServedBank
from lamina.serve.schemas import ReadersChanged, ReadersRequest
from lamina.store.manifest import MANIFEST
from lamina.utils import is_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI

logger = logging.getLogger(__name__)


@final
class Reloader:
    """Changes the readers of a running scheduler, one change at a time. A failed change leaves everything as it was.

    Args:
        scheduler: The scheduler whose bank is replaced.
        source: Folder or hub id of the bank, which `reload` loads again. None: `reload` is refused.
        root: Folder of the banks whose readers may be added. None: no reader can be added.
    """

    def __init__(self, scheduler: Scheduler, source: str | None = None, root: Path | None = None) -> None:
        self._scheduler, self._source, self._root = scheduler, source, root
        # A change reads the served bank, loads files and then replaces the bank; two at once would undo each other.
        self._lock = Lock()
        # Reader name -> its latest version. It keeps removed names, so that a version number is never used twice.
        self._latest = dict(scheduler.served.versions)

    def put(self, folder: str, readers: Sequence[str] | None = None) -> ServedBank:
        """Add readers of a saved bank, and replace served readers of the same names.

        A cascade whose first reader is then another than the one that it was calibrated with is removed; see
        `ReaderBank.update`.

        Raises ConfigError if the server has no root, the folder is not a bank in the root, or a monitor of an added
        reader has the name of one that stays; UnknownNameError if the bank lacks a reader in `readers`; StoreError if
        the bank's files are damaged; BaseMismatchError if it was trained on another model; NotFiniteError if a weight
        is NaN or infinite.

        Args:
            folder: The bank's folder, relative to the root.
            readers: Names of the readers to add. None: all readers of that bank.

        Returns:
            The bank that is served after the change.
        """
        place = self._inside(folder)
        with self._lock:
            bank = self._scheduler.bank
            loaded = ReaderBank.from_pretrained(place, bank.model, bank.processor)
            chosen = [*loaded] if readers is None else list(readers)
            return self._serve([*bank], loaded, chosen)

    def remove(self, name: str) -> ServedBank:
        """Remove the reader `name`, and return the bank that is served after the change.

        A cascade whose first reader it is stays stored with the second one, but does not run. It is removed when a
        reader of that name is added again.

        Raises UnknownNameError if no reader has that name, and ConfigError if it is the last reader.
        """
        with self._lock:
            bank = self._scheduler.bank
            if name not in bank:
                raise UnknownNameError(op="serve", got=name, known=bank, what="reader")
            return self._serve([other for other in bank if other != name])

    def reload(self) -> ServedBank:
        """Load the bank again from its folder or hub id, and serve exactly the readers that are in it now.

        Each gets a new version; the model stays. Raises ConfigError if the bank was not loaded from a folder or hub id,
        or has no reader now; StoreError if its files are missing or damaged; BaseMismatchError if it was trained on
        another model; NotFiniteError if a weight is NaN or infinite.
        """
        if self._source is None:
            raise ConfigError("serve: this bank was not loaded from a folder or hub id, so it cannot be loaded again.")
        with self._lock:
            bank = self._scheduler.bank
            loaded = ReaderBank.from_pretrained(self._source, bank.model, bank.processor)
            return self._serve([], loaded, [*loaded], loaded.folder)

    def try_reload(self) -> None:
        """Reload the bank, and log the outcome. Errors are logged and not raised, because a signal has no caller."""
        try:
            with convert_errors(lambda reason: LaminaError(f"serve: the bank cannot be loaded again ({reason}).")):
                served = self.reload()
        except LaminaError as error:
            logger.error("%s The server keeps its present readers.", error, exc_info=error.__cause__)
        else:
            logger.info("serve: reloaded %s", ", ".join(f"{name} {served.versions[name]}" for name in served.bank))

    def _serve(
        self,
        present: Sequence[str],
        loaded: ReaderBank | None = None,
        chosen: Sequence[str] = (),
        folder: Path | None = None,
    ) -> ServedBank:
        """Build a bank from served and loaded readers, and serve it. The caller holds the lock.

        The bank that was served so far is not changed. Raises LaminaError if a reader does not exist or does not fit, a
        weight is NaN or infinite, or no reader is left.

        Args:
            present: Names of the served readers that stay, or that loaded ones replace.
            loaded: Bank of the loaded readers. None: there are none.
            chosen: Names of the readers of `loaded` to serve. Their version is 1 higher than the latest of their name.
            folder: Folder that may hold an export of the new bank. None: there is none.
        """
        old = self._scheduler.served
        bank = ReaderBank(old.bank.model, old.bank.processor, saves_base=old.bank.saves_base, info=old.bank.info).eval()
        bank.folder = folder
        bank.update(old.bank, present)
        sources = dict.fromkeys(bank, old.bank)
        if loaded is not None:
            bank.update(loaded, chosen)
            sources |= dict.fromkeys(chosen, loaded)
        for name in chosen:
            if weight := first_non_finite(bank[name].named_parameters()):
                raise NotFiniteError(f"serve: weight '{weight}' of reader '{name}' is not finite.", name=weight)
        removed = [
            monitor
            for name, source in sources.items()
            for monitor in source[name].monitors
            if monitor not in bank[name].monitors
        ]
        new_versions = {name: self._latest.get(name, 0) + 1 for name in chosen}
        versions = {name: new_versions.get(name) or old.versions[name] for name in bank}
        self._scheduler.serve(served := ServedBank(bank, old.number + 1, versions, removed))
        self._latest |= new_versions
        return served

    def _inside(self, folder: str) -> Path:
        """Return the path of a bank's folder inside the root; `folder` is relative to the root.

        Links are resolved first, so that none leads out of the root. Raises ConfigError if the server has no root, or
        there is no bank in `folder`.
        """
        if self._root is None:
            raise ConfigError("serve: the server was started without --readers-root; readers cannot be added.")
        rule = "give the name of a bank's folder under --readers-root, such as sentiment-v2"
        if "\0" in folder or Path(folder).is_absolute():
            raise ConfigError(f"serve: folder is {folder!r}; {rule}.")
        root = self._root.resolve()
        place = (root / folder).resolve()
        if not place.is_relative_to(root) or not is_file(place / MANIFEST):
            raise ConfigError(f"serve: there is no bank in {folder!r}; {rule}.")
        return place


def add_reader_routes(app: FastAPI, reloader: Reloader, scheduler: Scheduler) -> None:
    """Add the routes under `/readers` that list and change readers. `RequestGuard` requires the admin key for all."""

    def response(served: ServedBank) -> ReadersChanged:
        versions = {name: served.versions[name] for name in served.bank}
        removed = {"removed_monitors": served.removed} if served.removed else {}
        return ReadersChanged(bank_version=served.number, readers=versions, **removed)

    @app.get(ADMIN, response_model_exclude_unset=True)
    async def readers() -> ReadersChanged:
        """Return the readers that are served, each with its version."""
        return response(scheduler.served)

    @app.post(ADMIN, response_model_exclude_unset=True)
    async def put(body: ReadersRequest) -> ReadersChanged:
        """Add readers from a bank's folder, replacing readers of the same names; return all that are served then.

        Requests that were accepted before this call are answered by the old readers, later requests by the new ones.
        """
        return response(await run_in_threadpool(reloader.put, body.folder, body.readers))

    @app.post(f"{ADMIN}/reload", response_model_exclude_unset=True)
    async def reload() -> ReadersChanged:
        """Load the bank again from its folder, and serve exactly the readers in it; return their names and versions."""
        return response(await run_in_threadpool(reloader.reload))

    @app.delete(f"{ADMIN}/{{name}}", response_model_exclude_unset=True)
    async def remove(name: str) -> ReadersChanged:
        """Remove a reader, and return those that are left, each with its version."""
        return response(await run_in_threadpool(reloader.remove, name))
