"""Banks on the hub: what is fetched of a repository, what is pushed to it, and what the hub's refusals mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import huggingface_hub
from huggingface_hub import errors

from lamina.bank import NAME
from lamina.errors import LaminaError, StoreError, first_line
from lamina.store import manifest as facts
from lamina.utils import is_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.bank import ReaderBank

_LOGIN = "Log in with `hf auth login`, or set HF_TOKEN."


def local_folder(folder: str | Path, revision: str | None, readers: Sequence[str] | None, *, base: bool) -> Path:
    """The folder itself, or that of its copy from the hub.

    Fetched are the manifest, the card, some or all readers and, if it is asked for, the base that they carry.

    Raises:
        StoreError: If there is no such folder and no such repository, or the hub does not give it.
    """
    path, hub = Path(folder), cast("Any", huggingface_hub)
    if is_dir(path):
        return path
    try:
        if path.exists():
            raise StoreError(f"load: {path} is a file; a bank is a folder.")
        patterns = _patterns(readers, base=base)
        return Path(hub.snapshot_download(str(folder), revision=revision, allow_patterns=patterns))
    except LaminaError:
        raise
    except Exception as error:  # the hub's, the connection's and the disk's have no kind in common
        tried = "there is no such folder, and the hub gave none"
        raise StoreError(f"load: no bank '{folder}'; {tried} ({_reason(error, revision)}).") from error


def _patterns(readers: Sequence[str] | None, *, base: bool) -> list[str]:
    """Which files are fetched; a name that no reader can have is looked for in the manifest alone."""
    names = ["*"] if readers is None else [name for name in readers if NAME.fullmatch(name)]
    own = [f"{facts.READERS}/{name}/{file}" for name in names for file in (facts.READER, facts.WEIGHTS)]
    return [facts.MANIFEST, facts.CARD, *own, *([f"{facts.BASE}/*"] if base else [])]


def push_bank(
    bank: ReaderBank,
    repo: str,
    *,
    message: str = "Save readers",
    branch: str | None = None,
    create_pr: bool = False,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Save to the hub, see `ReaderBank.push_to_hub`; readers there that the bank no longer has are deleted."""
    mixin: Any = huggingface_hub.ModelHubMixin
    fixed = {"delete_patterns": [f"{facts.READERS}/*", f"{facts.BASE}/*"], "model_card_kwargs": {"title": repo}}
    where = {"private": private, "token": token, "branch": branch, "create_pr": create_pr}
    try:
        if branch is not None:
            api = huggingface_hub.HfApi(token=token)
            api.create_repo(repo, private=private, exist_ok=True)
            api.create_branch(repo, branch=branch, exist_ok=True)
        return str(mixin.push_to_hub(bank, repo, commit_message=message, **fixed, **where))
    except LaminaError:
        raise
    except Exception as error:
        raise StoreError(f"push_to_hub: '{repo}' was not saved ({_reason(error, branch)}).") from error


def _reason(error: BaseException, revision: str | None) -> str:
    """What a refusal means, where the hub's own words do not say it."""
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of a file that was asked for, and is not in the cache either
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return "it is no id of a repository, such as user/name"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision '{revision or 'main'}'"
    if isinstance(error, errors.GatedRepoError):
        return f"its owner lets in those who ask on its page. {_LOGIN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no such repository, or shows it to others than you. {_LOGIN}"
    if status == 401:
        return f"the hub does not know who you are. {_LOGIN}"
    if status == 403:
        return "your token does not allow that. Take one that may write there"
    return first_line(error)
