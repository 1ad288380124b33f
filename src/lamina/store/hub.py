"""Banks on the hub: fetching and pushing, by huggingface_hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub

from lamina.errors import StoreError
from lamina.store.manifest import BASE, CARD, MANIFEST, READERS
from lamina.store.models import first_line

if TYPE_CHECKING:
    from lamina.bank import ReaderBank

PATTERNS = [MANIFEST, CARD, f"{READERS}/*.json", f"{READERS}/*.safetensors", f"{BASE}/*"]


def fetch(repo: str, revision: str | None = None) -> Path:
    """Get a bank's files from the hub, or from its cache.

    Args:
        repo: Hub id.
        revision: Branch, tag or commit; None is the newest.

    Returns:
        The folder of the local copy.

    Raises:
        StoreError: If there is no such repository, or the hub cannot be reached.
    """
    hub: Any = huggingface_hub
    try:
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=PATTERNS))
    except (OSError, ValueError, RuntimeError) as error:  # the hub's errors are of these kinds
        raise StoreError(
            f"load: no bank '{repo}'; there is no such folder, and the hub gave none ({first_line(error)})."
        ) from error


def push_bank(bank: ReaderBank, repo: str, *, message: str = "Save readers", **options: Any) -> str:
    """Save a bank to a repository on the hub; readers there that the bank no longer has are deleted.

    Args:
        bank: The bank.
        repo: Hub id; made if it is not there.
        message: Of the commit.
        **options: `private`, `token`, `branch` and `create_pr`, as for `huggingface_hub.ModelHubMixin`.

    Returns:
        The address of the commit.

    Raises:
        StoreError: If the hub refuses or cannot be reached.
    """
    stale = [f"{READERS}/*", f"{BASE}/*"]
    try:
        mixin: Any = huggingface_hub.ModelHubMixin
        card = {"title": repo}
        return str(
            mixin.push_to_hub(
                bank, repo, commit_message=message, delete_patterns=stale, model_card_kwargs=card, **options
            )
        )
    except StoreError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise StoreError(
            f"push_to_hub: '{repo}' was not saved ({first_line(error)}). Check the id, your token and the connection."
        ) from error
