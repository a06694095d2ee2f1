"""A GRPO step of a large policy as shapes: nothing of it is ever allocated."""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.common import check_least
from experiments.compiled_memory import Peak, Taken
from experiments.setup import draft_head_config
from specrl_jax.data.prompts import Prompts
from specrl_jax.drafters.block_params import BlockConfig
from specrl_jax.drafters.draft_losses import DraftLossConfig
from specrl_jax.drafters.heads import HeadConfig, drafter_for_head, init_head
from specrl_jax.errors import InputError
from specrl_jax.models.backend import backend
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.params import init_params
from specrl_jax.parallel.mesh import FSDP, TENSOR
from specrl_jax.parallel.sharding import ROWS, row_devices
from specrl_jax.rl.drafting import DraftTraining
from specrl_jax.rl.grpo import GrpoState, GrpoStep, RolloutState, UpdateConfig
from specrl_jax.rl.losses import LossConfig
from specrl_jax.rl.microbatches import MicrobatchConfig
from specrl_jax.rl.optimizers import OptimizerConfig
from specrl_jax.rl.program import GrpoProgram
from specrl_jax.rl.scoring import Scorer
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.training.pieces import Rehearsed, StepPieces, rehearsed


@dataclass(frozen=True)
class Sizes:
    """Sizes of a step."""

    context: int = 16_384
    """Tokens of prompt and response at most."""
    prompt_tokens: int = 1024
    microbatch_tokens: int = 32_768
    """Of a gradient, for each group of devices along tensor."""
    rows: int = 16
    """Live rows of a rollout per device."""
    prompts: int = 64
    """Per step, over all devices."""
    samples: int = 16
    draft_length: int = 3
    head: Literal["eagle3", "block"] = "eagle3"
    """An EAGLE-3 head over `draft_vocab` tokens, or a block drafter of five layers over all (Qwen3-8B-DFlash-b16)."""
    draft_vocab: int = 32_000
    """Of an EAGLE-3 head."""
    draft_microbatches: int = 8
    """Microbatches of an update that leave sequences for the draft head."""
    draft_sequences: int = 1
    """Sequences that each of them leaves."""
    draft_rows: int = 1
    """Of them, in a microbatch of the head."""
    unroll: int = 3
    """Steps of an EAGLE-3 head's training-time test."""

    def __post_init__(self) -> None:
        least = {field.name: 1 for field in fields(self) if field.name != "head"}
        check_least("", self, **least | {"context": 2, "samples": 2})
        if self.prompt_tokens >= self.context:
            raise InputError(
                f"--prompt-tokens is {self.prompt_tokens} and --context {self.context}; leave room for a response"
            )
        if self.microbatch_tokens < self.context:
            raise InputError(
                f"--microbatch-tokens is {self.microbatch_tokens}, less than a sequence of {self.context}; "
                "raise it, or lower --context"
            )
        left = self.draft_microbatches * self.draft_sequences
        if self.draft_rows > left:
            raise InputError(
                f"--draft-rows is {self.draft_rows}, of {left} sequences that are left for the head; "
                "lower it, or raise --draft-microbatches or --draft-sequences"
            )


@dataclass(frozen=True, eq=False)
class AbstractStep:
    """program: the step. sizes: of it. head: architecture of its draft head."""

    program: GrpoProgram
    sizes: Sizes
    head: HeadConfig

    @cached_property
    def state(self) -> GrpoState:
        """Shapes of the training's state, with the shardings it is stored in."""
        shapes = jax.eval_shape(self._first_state, jax.random.key(0))
        return jax.tree.map(_placed, shapes, self.program.shardings(shapes))

    def _first_state(self, key: Any) -> GrpoState:
        """Random policy and head, which drafts the first tokens of the vocabulary."""
        policy_key, head_key = jax.random.split(key)
        params = init_params(policy_key, self.program.step.engine.policy)
        head = init_head(head_key, self.head, params, np.arange(self.head.draft_vocab_size))
        return self.program.step.init(params, head)

    @cached_property
    def prompts(self) -> Prompts:
        """Shapes of a step's prompts."""
        count, rows = self.program.groups, NamedSharding(self.program.mesh, P(ROWS))
        tokens, lengths = jnp.zeros((count, self.sizes.prompt_tokens), jnp.int32), jnp.zeros((count,), jnp.int32)
        made = jax.eval_shape(lambda: Prompts(tokens, lengths, lengths.astype(jnp.uint32)))
        return jax.tree.map(lambda x: _placed(x, rows), made)

    @cached_property
    def served(self) -> RolloutState:
        """Shapes of what a rollout reads."""
        if self.program.mesh.shape[FSDP] == 1:
            return self.program.gather(self.state)
        gather = self.program.gather_weights
        return self.program.served(self.state, rehearsed(gather, self.state.params, self.state.draft)[1])

    def rehearse(self) -> dict[str, Rehearsed]:
        """The programs of a step, compiled."""
        return StepPieces(self.program).rehearse(self.state, self.served, self.prompts, None)

    def measure(self, seed: int) -> dict[str, Taken]:
        """What the pieces of a step take, random weights and prompts and all, by running them."""
        peak, program, like = Peak(), self.program, self.prompts
        state_key, prompts_key = jax.random.split(jax.random.key(seed))
        state = jax.block_until_ready(self._placed_state(state_key))
        vocab = program.step.engine.policy.vocab_size
        tokens = jax.random.randint(prompts_key, like.tokens.shape, 1, vocab, jnp.int32)
        lengths = jnp.full(like.lengths.shape, like.tokens.shape[1], jnp.int32)
        prompts = Prompts(tokens, lengths, jnp.arange(lengths.shape[0], dtype=jnp.uint32))
        prompts = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), prompts, like)
        found = {}
        served = program.gather(state)
        trajectory, found["time_rollout_s"] = peak(program.rollout, served, prompts)
        judged = np.random.default_rng(seed).random(trajectory.lengths.shape[0], np.float32)
        rewards = program.hand_out(served, trajectory, judged)
        del served
        prepared = program.prepare(state, trajectory)
        (state, _, examples), found["time_update_s"] = peak(program.update, state, trajectory, prepared, rewards)
        del prepared
        _, found["time_draft_update_s"] = peak(program.update_drafter, state, trajectory, examples)
        return found

    def _placed_state(self, key: Any) -> GrpoState:
        """A first state on the mesh, made where it lies: no device could hold all of a large one."""
        if backend() == "cpu":  # whose devices share their memory, and whose compiler is slow at it
            return self.program.take_over(self._first_state(key))
        return jax.jit(self._first_state, out_shardings=self.program.shardings(self.state))(key)

    def beside(self, piece: str) -> int:
        """Bytes of the training's state on one device that a piece does not take as an argument."""
        state, lean = self.state, bytes_of((self.state.opt_state, self.state.reference))
        if piece == "time_update_s":
            return bytes_of(state.draft_opt_state)
        if piece == "time_draft_update_s":
            read = bytes_of((state.params.embed, state.params.head))
            return lean + bytes_of(state.params) - read
        # Where nothing is gathered, a rollout reads the weights where they are.
        gathers = self.program.mesh.shape[FSDP] > 1
        return lean + bytes_of(state.draft_opt_state) + (bytes_of((state.params, state.draft)) if gathers else 0)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes on one device of what is large, from shapes alone."""
        step, mesh = self.program.step, self.program.mesh
        policy = step.engine.policy
        itemsize, weights = jnp.dtype(policy.dtype).itemsize, bytes_of(self.served.params)
        tokens = step.update_config.microbatch.rows * self.sizes.context
        width = self.sizes.prompt_tokens
        layout = step.engine.layout(self.program.groups // row_devices(mesh), width)
        drafter = step.engine.drafter_bytes(layout.rows + layout.prompts, width)
        split = mesh.shape[TENSOR] if policy.num_kv_heads % mesh.shape[TENSOR] == 0 else 1
        left = (len(self.head.boundaries) + 1) * policy.hidden_size * self.sizes.context * itemsize
        return {
            "state": bytes_of(self.state),
            "weights as rollouts and gradients read them": weights,
            "sum of gradients": 4 * weights // itemsize,
            "inputs of layers": policy.num_layers * tokens * policy.hidden_size * itemsize,
            "cache": layout.pool_pages * step.engine.page_bytes() // split,
            "drafter's cache": drafter // split,
            "examples for the head": self.sizes.draft_microbatches * self.sizes.draft_sequences * left,
        }


def head_for(policy: PolicyConfig, sizes: Sizes) -> HeadConfig:
    """Architecture of the draft head."""
    if sizes.head == "eagle3":
        return draft_head_config(policy, sizes.draft_vocab)
    read = np.linspace(min(2, policy.num_layers), max(policy.num_layers - 2, 1), 5).round().astype(int)
    return BlockConfig(
        backbone=replace(policy, family="qwen3", num_layers=5, tie_embeddings=False),
        draft_vocab_size=policy.vocab_size,
        boundaries=tuple(sorted({int(layer) for layer in read})),
        block_size=16,
        sample_from_anchor=False,
    )


def abstract_step(policy: PolicyConfig, mesh: Mesh, sizes: Sizes) -> AbstractStep:
    """A step of a policy with a new head, a gradient of which recomputes every layer.

    Raises:
        InputError: the sizes do not split over the mesh, or do not fit the policy.
    """
    head, numerics = head_for(policy, sizes), Numerics("plain")
    law = SamplingLaw(1.0, end_ids=(0,))
    tensor = mesh.shape[TENSOR]
    rollout = RolloutConfig(
        sizes.context - sizes.prompt_tokens, sizes.samples, sizes.draft_length, law, rows=sizes.rows * tensor
    )
    engine = RolloutEngine(policy, rollout, numerics, drafter_for_head(head))
    engine.check_prompt_width(sizes.prompt_tokens)
    scorer = Scorer(policy, law, numerics, remat=True)
    update = UpdateConfig(
        loss=LossConfig(),
        optimizer=OptimizerConfig(1e-6),
        microbatch=MicrobatchConfig(sizes.microbatch_tokens // sizes.context, (1.0,)),
        draft_sequences=sizes.draft_sequences,
        draft_microbatches=sizes.draft_microbatches,
    )
    loss = DraftLossConfig(sizes.unroll)
    drafting = DraftTraining(scorer, head, loss, OptimizerConfig(1e-4), MicrobatchConfig(sizes.draft_rows, (1.0,)))
    step = GrpoStep(engine, scorer, update, drafting, seed=0)
    return AbstractStep(GrpoProgram(step, mesh, sizes.prompts), sizes, head)


def bytes_of(tree: Any) -> int:
    """Bytes on one device of shapes with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _placed(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
