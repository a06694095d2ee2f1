"""Floor 0: the device mesh."""
