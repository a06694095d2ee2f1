"""Other engines as peers of a benchmark, each in an environment and a process of its own (README.md there)."""
