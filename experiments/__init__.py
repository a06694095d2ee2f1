"""Floor 5: scripts, each run as `python -m experiments.NAME`."""

import os

# Nothing here runs models of transformers; its notice that torch is missing would precede every output.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
