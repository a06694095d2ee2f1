"""Floor 0: tasks, datasets, tokenizers and encoded prompts."""
