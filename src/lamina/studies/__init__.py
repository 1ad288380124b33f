"""Studies: functions that measure something at each layer of a model and return a `Study`: a tidy table with charts."""

from lamina.errors import require_packages

require_packages("studies", "studies", "scipy", "sklearn")

from lamina.studies.benchmarking.benchmark import benchmark
from lamina.studies.cutting.advise import advise
from lamina.studies.cutting.finetuned import insertion, reinit
from lamina.studies.cutting.removal import removal
from lamina.studies.probing.error_analysis import errors
from lamina.studies.probing.probe import probe
from lamina.studies.states.drift import drift
from lamina.studies.states.importance import contributions, importance
from lamina.studies.states.lens import lens, lens_tokens
from lamina.studies.states.similarity import similarity
from lamina.studies.states.variability import variability
from lamina.studies.study import Figure, Study

__all__ = [
    "Figure",
    "Study",
    "advise",
    "benchmark",
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
