"""Studies: what each layer does, as a tidy table with its settings and figures; each is one function."""

from lamina.studies.similarity import similarity
from lamina.studies.study import Figure, Study

__all__ = ["Figure", "Study", "similarity"]
