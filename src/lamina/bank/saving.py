"""How a bank is saved, loaded and shared; what is written and read is in `lamina.store`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from huggingface_hub import ModelCard, ModelHubMixin

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SavedBank(ModelHubMixin):
    """The part of `ReaderBank` that saves and loads, by the names that models on the hub have."""

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, folder: str | Path, *, config: None = None, model_card_kwargs: dict[str, str] | None = None
    ) -> None:
        """Save every reader, a manifest that names the base, and a model card; the base too if it was trained along.

        A bank that is there is replaced as a whole; files of other names stay.

        Args:
            folder: Where to; made if it is not there.
            config: Not used; `ModelHubMixin.push_to_hub` gives it.
            model_card_kwargs: For `generate_model_card`.

        Raises:
            StoreError: If the folder cannot be written, or holds something that is not a bank under the same names.
        """
        from lamina.store import save_bank

        del config
        save_bank(cast("Any", self), folder, **(model_card_kwargs or {}))

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        folder: str | Path,
        model: PreTrainedModel | None = None,
        processor: Any = None,
        revision: str | None = None,
    ) -> Self:
        """Load a saved bank, in eval mode.

        Args:
            folder: A local folder or a hub id.
            model: The base; None: the one that the manifest names is loaded.
            processor: Its tokenizer; None: the base's own.
            revision: Revision of the bank on the hub.

        Raises:
            StoreError: If the folder is missing, incomplete or damaged.
            BaseMismatchError: If `model` is not the base that the readers were trained on.
            ModelNotFoundError: If the base is to be loaded and cannot be found.
        """
        from lamina.store import load_bank

        return cast("Any", load_bank(folder, model, processor, revision=revision))

    def push_to_hub(self, repo: str, **options: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Save to a repository on the hub, made if it is not there; returns the address of the commit.

        Args:
            repo: Its id.
            **options: `message`, `private`, `token`, `branch` and `create_pr`.

        Raises:
            StoreError: If the hub refuses or cannot be reached.
        """
        from lamina.store import push_bank

        return push_bank(cast("Any", self), repo, **options)

    def generate_model_card(self, title: str = "bank") -> ModelCard:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What a bank's folder or repository, named `title`, says about itself to a person."""
        from lamina.store import model_card

        return model_card(cast("Any", self), title)
