"""Seeds that do not depend on the order in which things happen."""

from __future__ import annotations

import hashlib


def mix(*parts: object) -> int:
    """A 63-bit seed from any parts, the same in every process."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
