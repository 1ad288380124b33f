"""The part of a bank that has to do with folders and the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import ModelCard, ModelHubMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from lamina.bank.bank import ReaderBank


class Saving(ModelHubMixin):
    """What `ReaderBank` does to be saved, shared and loaded."""

    @property
    def _bank(self) -> ReaderBank:
        return cast("ReaderBank", self)

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, folder: str | Path, *, config: None = None, model_card_kwargs: dict[str, str] | None = None
    ) -> None:
        """Save every reader, a manifest that names the base, and a model card; the base too if it was trained along.

        A bank that is there is replaced as a whole; files of other names stay. The base is named by where it was loaded
        from, or saved to by `lamina.save`; one that was changed since is not named, with a warning.

        Args:
            folder: Where to; made if it is not there.
            config: Not used, but given by `ModelHubMixin.push_to_hub`.
            model_card_kwargs: For `generate_model_card`.

        Raises:
            StoreError: If the folder cannot be written, or holds something that is not a bank under the same names.
            NotFiniteError: If a weight holds NaN or infinity.
        """
        from lamina.store import save_bank

        del config
        card: Any = model_card_kwargs or {}
        save_bank(self._bank, folder, **card)

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        folder: str | Path,
        model: PreTrainedModel | None = None,
        processor: Any = None,
        revision: str | None = None,
        readers: Sequence[str] | None = None,
    ) -> ReaderBank:
        """Load a saved bank, or some of its readers, in eval mode.

        Args:
            folder: A local folder or a hub id.
            model: The base; None: the one that the manifest names is loaded, with its head for text if monitors are
                kept with the readers.
            processor: Its tokenizer; None: the base's own.
            revision: Branch, tag or commit of the bank on the hub.
            readers: Names of the readers; None: all. Of a bank on the hub no other reader's files are fetched.
                `bank.update` takes them into a bank that is there.

        Raises:
            StoreError: If there is no such folder or repository, the hub does not give it, or it is incomplete or
                damaged.
            UnknownNameError: If the bank has no such reader.
            BaseMismatchError: If `model` is not the base that the readers were trained on.
            ModelNotFoundError: If the base is to be loaded and cannot be found.
        """
        from lamina.store import load_bank

        return load_bank(folder, model, processor, revision=revision, readers=readers)

    def push_to_hub(self, repo: str, **options: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Save to a repository on the hub, made if it is not there; returns the address of the commit.

        Options are `message`, `private`, `token`, `branch` (made if it is not there) and `create_pr`. It is one commit:
        the repository has all of it or is as before. Readers there that the bank no longer has are deleted.

        Raises:
            StoreError: If the hub refuses, or cannot be reached.
        """
        from lamina.store import push_bank

        return push_bank(self._bank, repo, **options)

    def generate_model_card(self, title: str = "bank") -> ModelCard:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What a bank's folder or repository, named `title`, says about itself to a person."""
        from lamina.store import model_card

        return model_card(self._bank, title)
