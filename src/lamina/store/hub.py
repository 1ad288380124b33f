"""Banks on the Hugging Face hub: download a bank, push a bank, and explain why the hub refused."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import huggingface_hub
from huggingface_hub import errors

from lamina.bank import NAME
from lamina.errors import LaminaError, StoreError, first_line
from lamina.store.manifest import BASE, CARD, MANIFEST, PROCESSOR, READER, READERS, WEIGHTS
from lamina.store.models import check_revision
from lamina.utils import is_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LOGIN = "Log in with `hf auth login`, or set HF_TOKEN."


def local_folder(folder: str, revision: str | None, readers: Sequence[str] | None, *, base: bool) -> Path:
    """Return the path of a bank's local folder; if no such folder exists, download the bank from the hub.

    Args:
        folder: A local folder, or the id of a repository on the hub.
        revision: Branch, tag or commit on the hub. None: the main branch.
        readers: Names of the readers to download. None: all readers.
        base: Whether to download the base model too, if it is saved with the bank.

    Raises:
        StoreError: If neither the folder nor the repository exists, or the download fails.
        ConfigError: If there is a revision for a local folder.
    """
    path = Path(folder)
    if is_dir(path):
        check_revision(folder, revision)
        return path
    try:
        if path.exists():
            raise StoreError(f"load: {path} is a file; a bank is a folder.")
        patterns = _patterns(readers, base=base)
        downloaded = huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
            folder, revision=revision, allow_patterns=patterns
        )
        return Path(downloaded)
    except LaminaError:
        raise
    except Exception as error:  # the hub's, the connection's and the disk's errors have no common class
        problem = "there is no such folder, and it cannot be loaded from the hub"
        raise StoreError(f"load: no bank '{folder}'; {problem} ({_reason(error, revision)}).") from error


def _patterns(readers: Sequence[str] | None, *, base: bool) -> list[str]:
    """Return patterns of the files to download: those of `readers` (None: all), with `base` also the base model's.

    A name that no reader can have (such as "*") would act as a pattern and is left out; loading reports it later.
    """
    names = ["*"] if readers is None else [name for name in readers if NAME.fullmatch(name)]
    reader_files = [f"{READERS}/{name}/{file}" for name in names for file in (READER, WEIGHTS)]
    return [MANIFEST, CARD, f"{PROCESSOR}/*", *reader_files, *([f"{BASE}/*"] if base else [])]


def push_folder(
    save: Callable[[Path], object],
    repo: str,
    *,
    message: str,
    branch: str | None,
    create_pr: bool,
    private: bool | None,
    token: str | None,
) -> str:
    """Save to a temporary folder, commit it to a repository on the hub, and return the address of the commit.

    If the repository has other files of readers, of a base model or of a processor, the same commit deletes them.

    Args:
        save: Called with the folder to write to.
        repo: Id of the repository, which is created if it does not exist.
        message: Message of the commit.
        branch: Branch, which is created if it does not exist. None: the main branch.
        create_pr: Open a pull request instead of committing to the branch.
        private: Whether a new repository is private. None: the account's default.
        token: Access token. None: the stored one.

    Raises:
        StoreError: If the hub refuses or cannot be reached, or `save` raises an error that is not a LaminaError.
        LaminaError: Any that `save` raises.
    """
    api = huggingface_hub.HfApi(token=token)
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if branch is not None:
            api.create_branch(repo, branch=branch, exist_ok=True)
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            save(Path(folder) / "bank")
            commit = api.upload_folder(
                repo_id=repo,
                folder_path=Path(folder) / "bank",
                commit_message=message,
                revision=branch,
                create_pr=create_pr,
                delete_patterns=[f"{READERS}/*", f"{BASE}/*", f"{PROCESSOR}/*"],
            )
        return str(commit)
    except LaminaError:
        raise
    except Exception as error:
        raise StoreError(f"push_to_hub: '{repo}' was not saved ({_reason(error, branch)}).") from error


def _reason(error: BaseException, revision: str | None) -> str:
    """Return why a request to the hub failed with `error`, as a phrase for an error message.

    `revision` is the revision that was requested; None: the main branch.
    """
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it says that the file is not in the cache; its cause is why the hub did not give it
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return "it is not the id of a repository, such as user/name"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision '{revision or 'main'}'"
    if isinstance(error, errors.GatedRepoError):
        return f"access must be requested on its page. {_LOGIN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no such repository, or it is private. {_LOGIN}"
    if status == 401:
        return f"the hub did not accept the login. {_LOGIN}"
    if status == 403:
        return "the token does not allow it. Use one with write access"
    return first_line(error)
