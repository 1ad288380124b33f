"""Gives a bank access to the code that saves and loads it, which is in a later room, `lamina.store`.

Storage has to import the bank, because loading builds one. So the bank cannot import storage: the two would form a
circle. Instead the bank knows only the functions that it calls, which are the protocol below, and the name of the
module that implements them. That module is imported on first use, as the rows of a `lamina.registry.Registry` are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from huggingface_hub import ModelCard
    from transformers import PreTrainedModel

    from lamina.bank.bank import ReaderBank
    from lamina.layers.types import Processor

MODULE = "lamina.store"


class BankStorage(Protocol):
    """The functions of `lamina.store` that a bank calls; the methods of `ReaderBank` document them."""

    def save_bank(
        self, bank: ReaderBank, folder: str | PathLike[str], *, title: str | None = None, changed_base: bool = False
    ) -> None:
        """Write the bank to a folder."""
        ...

    def load_bank(
        self,
        folder: str | PathLike[str],
        model: PreTrainedModel | None = None,
        processor: Processor | None = None,
        *,
        revision: str | None = None,
        readers: Sequence[str] | None = None,
    ) -> ReaderBank:
        """Return the bank that a folder or a repository on the hub contains."""
        ...

    def push_bank(
        self,
        bank: ReaderBank,
        repo: str,
        *,
        message: str = "Save readers",
        branch: str | None = None,
        create_pr: bool = False,
        private: bool | None = None,
        token: str | None = None,
    ) -> str:
        """Write the bank to a repository on the hub, and return the address of the commit."""
        ...

    def model_card(self, bank: ReaderBank, title: str) -> ModelCard:
        """Return the model card of the bank."""
        ...


def storage() -> BankStorage:
    """Import the module that implements storage, and return it."""
    return cast("BankStorage", import_module(MODULE))
