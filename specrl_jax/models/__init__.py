"""Floor 0: the policy, its attention, rotary embeddings and cache; Hugging Face folders in and out."""
