"""Floor 4: training loops, checkpoints, metrics and plots."""
