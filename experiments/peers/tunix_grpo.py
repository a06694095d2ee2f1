"""Peer: GRPO steps of tunix, vanilla rollouts in the same process.

A rollout is followed by a log-prob pass of the reference where `beta` is above 0,
and by none of the policy: with one update per rollout its ratio is 1.
"""

from collections.abc import Iterator
from typing import Any

from experiments.peers.protocol import loaded, serve
from experiments.peers.stepper import SAMPLES, Stepper, any_reward, random_prompts
from experiments.peers.tunix_model import NEVER, IdTokenizer, load_qwen3


class TunixGrpo:
    """A learner that takes one step per request."""

    def load(
        self,
        policy: str,
        beta: float = 0.0,
        prompt_tokens: int = 32,
        max_new_tokens: int = 128,
        learning_rate: float = 1e-6,
    ) -> dict[str, Any]:
        """Make a learner for 4 prompts of 4 samples; no response ends early."""
        import jax
        import numpy as np
        import optax
        from flax import nnx
        from tunix.rl import rl_cluster
        from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
        from tunix.rl.rollout.base_rollout import RolloutConfig

        actor = load_qwen3(policy)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        role = rl_cluster.Role
        cluster = rl_cluster.RLCluster(
            actor=actor,
            reference=load_qwen3(policy) if beta > 0 else None,
            tokenizer=IdTokenizer(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys((role.ACTOR, role.REFERENCE, role.ROLLOUT), mesh),
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.adamw(learning_rate), eval_every_n_steps=10**9, max_steps=10**9
                ),
                rollout_config=RolloutConfig(
                    max_tokens_to_generate=max_new_tokens,
                    max_prompt_length=prompt_tokens,
                    kv_cache_size=prompt_tokens + max_new_tokens,
                    temperature=1.0,
                    top_p=1.0,
                    eos_tokens=[NEVER],
                ),
            ),
        )

        def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
            return any_reward(completions)

        learner = GRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES, beta=beta), reward)
        self.stepper = stepper = Stepper()
        stepper.record(cluster, "generate", "rollout", lambda output: stepper.count(output.tokens))
        stepper.record(learner, "_compute_rewards", "reward")
        stepper.record(learner, "_generate_and_compute_advantage", "prepare", jax.block_until_ready)

        def batches() -> Iterator[dict[str, Any]]:
            seed = 0
            while True:
                # The update was only dispatched.
                jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
                stepper.wait()
                yield {"prompts": np.array(random_prompts(prompt_tokens, actor.config.vocab_size, seed))}
                seed += 1

        stepper.start(lambda: learner.train(batches()))
        return loaded("google-tunix", "jax", "flax", "optax", reference_pass=beta > 0, old_log_prob_pass=False)

    def step(self) -> dict[str, Any]:
        """One GRPO step; the first ones compile."""
        return self.stepper.answer()


if __name__ == "__main__":
    engine = TunixGrpo()
    serve({"load": engine.load, "step": engine.step})
