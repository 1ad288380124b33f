"""Texts that a server writes, with what the readers say of each token."""
