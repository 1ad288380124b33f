"""The HTTP service: every answer of a bank off one pass."""

from lamina.serve.application import create_app
from lamina.serve.scheduler import Scheduler
from lamina.serve.settings import Settings

__all__ = ["Scheduler", "Settings", "create_app"]
