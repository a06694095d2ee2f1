"""Floor 5: scripts, each run as `python -m experiments.NAME`."""
