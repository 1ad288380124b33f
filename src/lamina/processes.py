"""The processes of a run that several share."""

from __future__ import annotations

from torch import distributed


def processes() -> tuple[int, int]:
    """Number of this process, and how many there are."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def wait() -> None:
    """Wait until every process is here."""
    if processes()[1] > 1:
        distributed.barrier()
