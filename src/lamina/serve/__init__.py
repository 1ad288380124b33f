"""The HTTP service: every answer of a bank off one pass."""

from lamina.serve.app import create_app
from lamina.serve.engine import Engine
from lamina.serve.settings import Settings

__all__ = ["Engine", "Settings", "create_app"]
