"""RL post-training of language models in JAX, with exact speculative rollouts."""
