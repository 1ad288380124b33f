"""Whether the states that some fusions keep will fit, told before the run instead of by its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.bank import ReaderBank
    from lamina.train.plan import Group

GIB = 1 << 30


def kept_bytes(bank: ReaderBank, names: Sequence[str], tokens: int) -> int:
    """Bytes that the readers whose fusions need all states at once hold for one batch, at least.

    The states themselves are shared; while training every such reader also keeps what it computed from each of them.

    Args:
        bank: The readers and their model.
        names: Which readers.
        tokens: Windows in a batch times the length of the longest.
    """
    keepers = [bank[name] for name in names if not bank[name].config.fusion.streams]
    layers = {(reader.stack, layer) for reader in keepers for layer in reader.layers}
    shared = sum(bank.stacks[stack].width for stack, _ in layers) * bank.model.dtype.itemsize
    own = sum(len(reader.layers) * bank.stacks[reader.stack].width * 4 for reader in keepers)
    return tokens * (shared + own)


def check_memory(bank: ReaderBank, groups: Sequence[Group], batch_size: int) -> None:
    """Raise ConfigError if a batch's kept states are more than the device has room for."""
    for group in groups:
        count, longest = min(batch_size, len(group.encoded.lengths)), max(group.encoded.lengths)
        needed, free = kept_bytes(bank, group.names, count * longest), free_bytes(bank.device)
        if needed > free:
            keepers = [name for name in group.names if not bank[name].config.fusion.streams]
            raise ConfigError(
                f"fit: the fusions of {', '.join(keepers)} need all layers' states at once, {needed / GIB:.1f} GiB for "
                f"{count} windows of {longest} tokens; {free / GIB:.1f} GiB are free. Use a smaller batch_size or "
                "max_length, fewer layers or readers, or a fusion that streams."
            )


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
