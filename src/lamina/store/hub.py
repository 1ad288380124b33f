"""Banks on the hub: fetching and pushing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import StoreError, UnknownNameError
from lamina.store.bank import save_bank
from lamina.store.manifest import BASE, CARD, MANIFEST, READERS

if TYPE_CHECKING:
    from lamina.bank import ReaderBank

PATTERNS = [MANIFEST, CARD, f"{READERS}/*.json", f"{READERS}/*.safetensors", f"{BASE}/*"]
OPTIONS = ("private", "token", "revision", "commit_message")


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
    import huggingface_hub

    hub: Any = huggingface_hub
    try:
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=PATTERNS))
    except (OSError, ValueError, RuntimeError) as error:  # the hub's errors are of these kinds
        raise StoreError(
            f"load: no bank '{repo}'; there is no such folder, and the hub gave none ({_reason(error)}). "
            "Check the path, or the id and the connection."
        ) from error


def push_bank(bank: ReaderBank, repo: str, **options: Any) -> str:
    """Save a bank to a repository on the hub; readers there that the bank no longer has are deleted.

    Args:
        bank: The bank.
        repo: Hub id; made if it is not there.
        **options: `private`, `token`, `revision` and `commit_message`, as huggingface_hub takes them.

    Returns:
        The repository's address.

    Raises:
        UnknownNameError: If there is no such option.
        StoreError: If the hub refuses or cannot be reached.
    """
    import huggingface_hub

    for option in options:
        if option not in OPTIONS:
            raise UnknownNameError(op="push_to_hub", got=option, known=OPTIONS, what="option")
    api = huggingface_hub.HfApi(token=options.get("token"), library_name="lamina")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / repo  # its name is the card's title
        save_bank(bank, folder)
        try:
            address = api.create_repo(repo, private=options.get("private"), exist_ok=True)
            api.upload_folder(
                repo_id=address.repo_id,
                folder_path=folder,
                revision=options.get("revision"),
                commit_message=options.get("commit_message") or "Save readers",
                delete_patterns=f"{READERS}/*",
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise StoreError(
                f"push_to_hub: '{repo}' was not saved ({_reason(error)}). Check the id, your token and the connection."
            ) from error
    return str(address)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
