"""Readers that come and go while a server runs."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, final

from starlette.concurrency import run_in_threadpool

from lamina.bank import ReaderBank
from lamina.errors import ConfigError, LaminaError, NotFiniteError, UnknownNameError
from lamina.layers.nan_checks import first_non_finite
from lamina.serve.middleware import ADMIN
from lamina.serve.scheduler import Scheduler, ServedBank
from lamina.serve.schemas import ReadersChanged, ReadersRequest
from lamina.store.manifest import MANIFEST
from lamina.utils import is_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI

logger = logging.getLogger(__name__)


@final
class Reloader:
    """Puts readers in place of others, one change after another; a change that fails leaves all as it was.

    Args:
        scheduler: What answers.
        source: Folder or hub id of the bank that is served, which `reload` reads again.
        root: The folder under which readers may be taken from.
    """

    def __init__(self, scheduler: Scheduler, source: str | None = None, root: Path | None = None) -> None:
        self._engine, self._source, self._root = scheduler, source, root
        self._lock = Lock()
        self._counts = dict(scheduler.served.versions)  # of names that were taken out too

    def put(self, folder: str, readers: Sequence[str] | None = None) -> ServedBank:
        """Serve readers of a bank's folder too, in place of those of the same names.

        Args:
            folder: Under the root.
            readers: Names; None: all that the folder holds.

        Raises:
            ConfigError: If there is no root, or the folder is not under it.
            UnknownNameError, StoreError, BaseMismatchError, NotFiniteError: If the readers cannot be used.
        """
        place = self._inside(folder)
        with self._lock:
            bank = self._engine.bank
            loaded = ReaderBank.from_pretrained(place, bank.model, bank.processor)
            chosen = [*loaded] if readers is None else list(readers)
            return self._serve({name: bank for name in bank if name not in chosen}, dict.fromkeys(chosen, loaded))

    def remove(self, name: str) -> ServedBank:
        """Serve a reader no more; UnknownNameError if there is none of that name, ConfigError if it is the last."""
        with self._lock:
            bank = self._engine.bank
            if name not in bank:
                raise UnknownNameError(op="serve", got=name, known=bank, what="reader")
            return self._serve({other: bank for other in bank if other != name}, {})

    def reload(self) -> ServedBank:
        """Serve just the readers that the bank's own folder, or its repository, has now.

        Raises:
            ConfigError: If it is not known where the bank came from.
            UnknownNameError, StoreError, BaseMismatchError, NotFiniteError: If the readers cannot be used.
        """
        if self._source is None:
            raise ConfigError("serve: this bank was not loaded from a folder; there is nothing to read again.")
        with self._lock:
            bank = self._engine.bank
            loaded = ReaderBank.from_pretrained(self._source, bank.model, bank.processor)
            return self._serve({}, dict.fromkeys(loaded, loaded))

    def try_reload(self) -> None:
        """Reload for somebody who cannot be answered; the log says what came of it."""
        try:
            served = self.reload()
        except LaminaError as error:
            logger.error("%s The readers of before are served on.", error)
        else:
            logger.info("serve: reloaded %s", ", ".join(f"{name} {served.versions[name]}" for name in served.bank))

    def _serve(self, kept: Mapping[str, ReaderBank], new: Mapping[str, ReaderBank]) -> ServedBank:
        old = self._engine.served
        facts = {"saves_base": old.bank.saves_base, "info": old.bank.info}
        bank = ReaderBank(old.bank.model, old.bank.processor, **facts).eval()  # its readers answer meanwhile
        for name, source in {**kept, **new}.items():
            bank.update(source, [name])
        for name in new:
            if weight := first_non_finite(bank[name].named_parameters()):
                raise NotFiniteError(f"serve: weight '{weight}' of reader '{name}' is not finite.", name=weight)
        counts = {name: self._counts.get(name, 0) + 1 for name in new}
        versions = {name: counts.get(name) or old.versions[name] for name in bank}
        self._engine.serve(served := ServedBank(bank, old.number + 1, versions))
        self._counts |= counts
        return served

    def _inside(self, folder: str) -> Path:
        """The folder, which is there and under the root once all links are followed."""
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


def add_reader_routes(app: FastAPI, live: Reloader, scheduler: Scheduler) -> None:
    """The paths that change what is served; `RequestGuard` asks for the second key at all of them."""

    def told(served: ServedBank) -> dict[str, Any]:
        return {"bank_version": served.number, "readers": {name: served.versions[name] for name in served.bank}}

    @app.get(ADMIN, response_model=ReadersChanged)
    async def readers() -> dict[str, Any]:
        """The readers that are served, each with its version."""
        return told(scheduler.served)

    @app.post(ADMIN, response_model=ReadersChanged)
    async def put(asked: ReadersRequest) -> dict[str, Any]:
        """Add readers of a folder under the root, or replace those of the same names.

        Requests that were accepted before are answered by the readers of before, later ones by the new.
        """
        return told(await run_in_threadpool(live.put, asked.folder, asked.readers))

    @app.post(f"{ADMIN}/reload", response_model=ReadersChanged)
    async def reload() -> dict[str, Any]:
        """Serve just the readers that the bank's own folder has now, as the signal SIGHUP does."""
        return told(await run_in_threadpool(live.reload))

    @app.delete(f"{ADMIN}/{{name}}", response_model=ReadersChanged)
    async def remove(name: str) -> dict[str, Any]:
        """Serve a reader no more."""
        return told(await run_in_threadpool(live.remove, name))
