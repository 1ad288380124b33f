"""Studies that train probes on frozen layers, and the baselines and controls that the scores are compared with."""
