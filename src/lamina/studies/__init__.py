"""Studies: what each layer does, as a tidy table with its settings and figures; each is one function."""

from lamina.studies.advise import advise
from lamina.studies.contributions import contributions
from lamina.studies.drift import drift
from lamina.studies.errors import errors
from lamina.studies.importance import importance
from lamina.studies.insertion import insertion
from lamina.studies.lens import lens
from lamina.studies.lens_tokens import lens_tokens
from lamina.studies.probe import probe
from lamina.studies.reinit import reinit
from lamina.studies.removal import removal
from lamina.studies.similarity import similarity
from lamina.studies.study import Figure, Study
from lamina.studies.variability import variability

__all__ = [
    "Figure",
    "Study",
    "advise",
    "contributions",
    "drift",
    "errors",
    "importance",
    "insertion",
    "lens",
    "lens_tokens",
    "probe",
    "reinit",
    "removal",
    "similarity",
    "variability",
]
