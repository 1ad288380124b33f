"""The HTTP service: it answers requests with all readers of a bank, in one pass of the model."""

import warnings

from lamina.serve.application import create_app
from lamina.serve.scheduler import Scheduler
from lamina.serve.settings import Settings

__all__ = ["Scheduler", "Settings", "create_app"]


def __getattr__(name: str) -> object:
    if name == "Engine":  # the scheduler's name until 0.1.0
        new = "lamina.serve.Scheduler"
        warnings.warn(
            f"lamina.serve.Engine is now {new}; the old name goes in 0.2.0.", DeprecationWarning, stacklevel=2
        )
        return Scheduler
    raise AttributeError(f"module 'lamina.serve' has no attribute '{name}'; it has {', '.join(__all__)}")
