"""Whole runs of real policies: what to type, what it takes, what to expect.

Every recipe is `train_grpo` with presets of its own, so that all its options can be given too. Its `reduced` preset
takes two steps at small sizes with any --policy and --drafter of the same layout.
"""
