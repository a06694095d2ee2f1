"""Floor 3: rewards, advantages, losses and the GRPO step."""
