"""Floor 2: noise, verification, the draft-verify round and the rollout engine."""
