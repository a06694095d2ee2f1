"""Peer: GRPO steps of TRL, rollouts by `generate` of transformers.

A rollout is followed by a log-prob pass of the reference where `beta` is above 0,
and by none of the policy: with one update per rollout its ratio is 1.
"""

import tempfile
from typing import Any

from experiments.peers.protocol import loaded, serve
from experiments.peers.stepper import PROMPTS, SAMPLES, Stepper, any_reward, random_prompts


class TrlGrpo:
    """A trainer that takes one step per request."""

    def load(
        self,
        policy: str,
        beta: float = 0.0,
        prompt_tokens: int = 32,
        max_new_tokens: int = 128,
        learning_rate: float = 1e-6,
    ) -> dict[str, Any]:
        """Make a trainer for 4 prompts of 4 samples; no response ends early."""
        import torch
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, local_files_only=True)
        vocab_size = model.config.vocab_size
        # The folder's end tokens would end responses.
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        self.stepper = stepper = Stepper()

        class Hold(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                stepper.wait()

        def reward(completions: list[str], **_: Any) -> list[float]:
            return any_reward(completions)

        self.folder = tempfile.TemporaryDirectory()
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=self.folder.name,
                per_device_train_batch_size=PROMPTS * SAMPLES,
                num_generations=SAMPLES,
                max_completion_length=max_new_tokens,
                max_steps=10**6,
                beta=beta,
                learning_rate=learning_rate,
                lr_scheduler_type="constant",
                optim="adamw_torch",
                temperature=1.0,
                top_k=0,
                # The defaults save memory for time.
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                disable_tqdm=True,
                logging_steps=10**6,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=Dataset.from_dict(
                {"prompt": [text for seed in range(16) for text in random_prompts(prompt_tokens, vocab_size, seed)]}
            ),
            processing_class=_id_tokenizer(vocab_size),
            callbacks=[Hold()],
        )
        stepper.record(trainer, "_generate_single_turn", "rollout", lambda output: stepper.count(output[0]))
        stepper.record(trainer, "_calculate_rewards", "reward")
        stepper.record(trainer, "_generate_and_score_completions", "prepare")
        stepper.start(trainer.train)
        return loaded("trl", "transformers", "torch", reference_pass=beta > 0, old_log_prob_pass=False)

    def step(self) -> dict[str, Any]:
        """One GRPO step."""
        return self.stepper.answer()


def _id_tokenizer(vocab_size: int) -> Any:
    """Texts are token ids in decimal; the end token lies beyond the policy's vocabulary and never comes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {str(i): i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab | {"<end>": vocab_size}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="0", unk_token="0")


if __name__ == "__main__":
    engine = TrlGrpo()
    serve({"load": engine.load, "step": engine.step})
