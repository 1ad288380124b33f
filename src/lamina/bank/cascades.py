"""Remove cascades of monitors whose first reader is not the one that they were calibrated with."""

from __future__ import annotations

import logging
from copy import copy
from typing import TYPE_CHECKING

from lamina.layers.fingerprints import fingerprint_of_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.bank.reader import ReaderModule

logger = logging.getLogger(__name__)


def without_stale_cascades(
    op: str, after: Mapping[str, ReaderModule], before: Sequence[Mapping[str, ReaderModule]]
) -> dict[str, ReaderModule]:
    """Return the readers that a bank gets, without the cascades whose thresholds were chosen for another first reader.

    A cascade is stored with its second reader, and names its first one. It stays if the first reader that it finds has
    the weights of the reader of that name in a bank that has its second reader, or one of the same name with the same
    weights; or if it finds none. A reader that loses a cascade is replaced by a copy with the same modules, since other
    banks may share it. A warning, which `op` begins, names the cascades.

    Args:
        op: Name of the operation that changes the bank.
        after: Name -> reader, for all readers of the bank after the change.
        before: The same for each bank from which these readers come, as it was before the change.
    """
    readers: dict[str, ReaderModule] = {}
    for name, reader in after.items():
        readers[name] = reader
        firsts = [first for first in after if reader.cascades_of([first])] if reader.monitors else []
        if not firsts:
            continue
        origins = [bank for bank in before if any(_are_equal(known, reader) for known in _named(bank, name, reader))]
        stale = {
            first
            for first in firsts
            if not any(first in bank and _are_equal(bank[first], after[first]) for bank in origins)
        }
        if dropped := reader.cascades_of(stale):
            readers[name] = own = copy(reader)
            own.info = dict(reader.info)
            own.drop_cascades_of(stale)
            cause = "they were calibrated with another first reader than the bank has now"
            hint = "Add both readers from one bank, or calibrate again"
            logger.warning(
                "%s: removed the cascades %s of reader '%s': %s. %s", op, ", ".join(dropped), name, cause, hint
            )
    return readers


def _named(bank: Mapping[str, ReaderModule], name: str, reader: ReaderModule) -> list[ReaderModule]:
    """Return the readers of a bank that may be `reader`: itself under any name, and the one called `name`."""
    return [known for other, known in bank.items() if known is reader or other == name]


def _are_equal(first: ReaderModule, second: ReaderModule) -> bool:
    """Return whether two readers have the same weights."""
    if first is second:
        return True
    return len({fingerprint_of_tensors(reader.state_dict().items()) for reader in (first, second)}) == 1
