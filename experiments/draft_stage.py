"""Training a draft head on rollouts of its policy: the options, and the stage itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments.common import check_least, progress
from experiments.setup import per_device
from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.draft_losses import DraftLossConfig
from specrl_jax.drafters.eagle3_params import select_draft_vocab
from specrl_jax.drafters.heads import HeadConfig, HeadDrafter, HeadParams, init_head
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import forward, grid_batch, sequence_positions
from specrl_jax.parallel.hosts import to_host
from specrl_jax.parallel.sharding import Layout, row_devices
from specrl_jax.rl.drafting import DraftTraining
from specrl_jax.rl.microbatches import MicrobatchConfig
from specrl_jax.rl.optimizers import OptimizerConfig
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.trajectory import Sequences, to_sequences
from specrl_jax.training.checkpoints import latest_step, restore_checkpoint
from specrl_jax.training.draft_head import OfflineDraftTraining
from specrl_jax.training.sampling import Sampler, sample_all
from specrl_jax.training.stages import run_stage


@dataclass(frozen=True)
class DraftStageOptions:
    """Training of a draft head on the policy's rollouts."""

    prompts: int = 2048
    """Prompts whose rollouts are the training data; many, since a head remembers what it has seen before."""
    samples: int = 1
    """Rollouts per prompt."""
    steps: int = 300
    batch: int = 32
    """Sequences per update."""
    microbatch: MicrobatchConfig = MicrobatchConfig(8)
    unroll: int = 3
    """Steps of the training-time test."""
    loss: Literal["kl", "tv", "lk"] = "kl"
    """kl: cross-entropy with the policy; tv: total variation; lk: kl where drafts are bad, tv where they are good."""
    vocab_size: int = 32_000
    """Most tokens that the head may propose: the most frequent ones of the rollouts."""
    optimizer: OptimizerConfig = OptimizerConfig(
        0.012, name="muon", warmup_steps=5, schedule="linear", adam_learning_rate=0.004
    )

    def __post_init__(self) -> None:
        check_least("draft", self, prompts=1, samples=1, steps=0, batch=1, unroll=1, vocab_size=1)

    def training(self, scorer: Scorer, head: HeadConfig, optimizer: OptimizerConfig) -> DraftTraining:
        """How the head is trained; its own forwards of the policy need no invariant bits."""
        loss = DraftLossConfig(steps=self.unroll, kind=self.loss)
        plain = replace(scorer, numerics=Numerics("plain"))
        return DraftTraining(plain, head, loss, optimizer, self.microbatch)


@dataclass
class Rollouts:
    """Rollouts that trainings share: made when first asked for. seconds: that this took."""

    make: Callable[[], Sequences]
    seconds: float = 0.0

    @cached_property
    def _made(self) -> Sequences:
        start = time.perf_counter()
        made = jax.block_until_ready(self.make())
        self.seconds = time.perf_counter() - start
        return made

    def __call__(self) -> Sequences:
        """The rollouts."""
        return self._made


@dataclass(frozen=True, eq=False)
class DraftStage:
    """A head trained offline on rollouts of the policy.

    options: of the stage. engine: rolls out without drafts, `options.samples` responses to a prompt.
    training, drafter: of the head. mesh: of both. seed: of rollouts and order. together: responses rolled out at once.
    """

    options: DraftStageOptions
    engine: RolloutEngine
    training: DraftTraining
    drafter: HeadDrafter
    mesh: Mesh
    seed: int
    together: int

    @cached_property
    def _offline(self) -> OfflineDraftTraining:
        share = per_device(self.options.batch, self.mesh, "--draft.batch")
        return OfflineDraftTraining(self.training, share, self.seed)

    @property
    def _layout(self) -> Layout:
        return Layout(self.mesh, self.drafter.config.num_kv_heads)

    def sampler(self, prompts: int) -> Sampler:
        """What rolls out for so many prompts."""
        batch = min(prompts, max(1, self.together // self.options.samples))
        return Sampler(self.engine, self.mesh, "draft_data", self.seed, batch)

    def corpus(self, params: PolicyParams, prompts: Prompts) -> Sequences:
        """Rollouts of the policy."""
        trajectory = sample_all(self.sampler(len(prompts.lengths)), params, None, prompts)
        devices = row_devices(self.mesh)
        rows = len(trajectory.lengths) // devices * devices
        return jax.tree.map(lambda x: x[:rows], to_sequences(jax.tree.map(jnp.asarray, trajectory)))

    def fresh(self, params: PolicyParams, corpus: Sequences, key: Any) -> HeadParams:
        """A new head: its draft vocabulary, and the size of the features that it reads, are the corpus's."""
        head = self.drafter.config
        few = jax.tree.map(lambda x: x[: self.options.microbatch.rows], corpus)
        batch = grid_batch(few.tokens, sequence_positions(few.lengths, few.tokens.shape[1]))
        out = forward(params, self.engine.policy, batch, numerics=Numerics("plain"), boundaries=head.boundaries)
        features = to_host(out.features).astype(np.float32)[np.asarray(batch.positions) >= 0]
        scale = float(np.sqrt(np.mean(features**2)))
        tokens = np.asarray(corpus.tokens)[np.asarray(corpus.mask)]
        seen = np.bincount(tokens, minlength=self.engine.policy.vocab_size)
        ids = select_draft_vocab(seen, head.draft_vocab_size)
        # Where a trained head lies too, so that both are drafted with by one program.
        return self._layout.place(init_head(key, head, params, ids, scale))

    def train(
        self,
        params: PolicyParams,
        rollouts: Rollouts,
        key: Any,
        checkpoints: Path,
        start: HeadParams | None = None,
    ) -> tuple[HeadParams, float]:
        """Train a fresh head, or the one given, on rollouts of the policy (`corpus`).

        A finished stage is read from its checkpoint and asks for no rollouts.

        Returns:
            The head, and the seconds spent on it, those of the rollouts included whichever training made them.
        """
        head, offline, steps = self.drafter.config, self._offline, self.options.steps
        if latest_step(checkpoints) == steps:
            blank = offline.init(start or init_head(key, head, params, np.arange(head.draft_vocab_size)))
            blank = self._layout.place(blank)
            state, meta = restore_checkpoint(checkpoints, blank)
            return state.draft, meta.get("seconds", 0.0)
        corpus = rollouts()
        draft = self.fresh(params, corpus, key) if start is None else start

        def program(count: int) -> Any:
            compiled = offline.program(self.mesh, count)
            return lambda state: compiled(state, params, corpus)

        with progress("draft head", steps, latest_step(checkpoints) or 0) as advance:

            def report(done: int, count: int, metrics: dict[str, Any]) -> bool:
                overlap = ", ".join(f"{x:.2f}" for x in metrics["draft_overlap"][-1])
                advance(count, f"loss {np.mean(metrics['draft_loss']):.3f}, overlap {overlap}")
                return False

            state, seconds = run_stage(
                checkpoints,
                self._layout.place(offline.init(draft)),
                total=steps,
                chunk=max(1, min(50, steps // 2)),
                program=program,
                on_chunk=report,
                spent=rollouts.seconds,
            )
        return state.draft, seconds
