"""Studies that train probes on frozen layers, with the baselines and controls that their scores are compared with."""
