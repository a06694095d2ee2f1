"""The policy's sampling law, defined once for rollouts, drafts, log-probs and losses."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from specrl_jax.errors import InputError
from specrl_jax.models.config import PolicyConfig
from specrl_jax.models.few_tokens import in_kernels_alone, on_a_cpu
from specrl_jax.models.numerics import Numerics, beside_kernels, in_chunks, map_tokens
from specrl_jax.models.params import PolicyParams
from specrl_jax.models.policy import head_weights, token_logits
from specrl_jax.parallel.sharding import compiler_splits
from specrl_jax.rollout.noise import best, gumbel_noise, noise_words


@struct.dataclass
class Context:
    """What the law of a token depends on besides its logits.

    position: index of the token in its response, `[n]`.
    seen: vocabulary entries that occur before it, prompt included, `[n, v]`; None where the law does not ask.
    """

    position: Int[Array, "n"]
    seen: Bool[Array, "n v"] | None = None


@dataclass(frozen=True)
class SamplingLaw:
    """The law of the next token, made from logits in this order (that of `transformers`).

    1. repetition_penalty r: positive logits of tokens seen before are divided by it, negative ones multiplied.
    2. forbidden tokens, and end tokens among the first `min_new_tokens`, get probability 0.
    3. temperature: log softmax(logits / temperature), the tempered law. 1 is the policy itself; at 0 the most
       probable token is taken, without a division, and log-probs are reported at temperature 1.
    4. Of the tempered law remain the top_k most probable tokens, then of these as many as it takes to reach the
       mass top_p, then those of at least min_p times the probability of the best. Each of the three keeps
       what lies above a threshold, ties included, so that one threshold per token describes them all.
    5. What remains is scaled to sum to 1.

    top_k 0, top_p 1, min_p 0 and repetition_penalty 1 change nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    forbidden: tuple[int, ...] = ()
    min_new_tokens: int = 0
    end_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (self.temperature == 0.0 or 0.001 <= self.temperature <= 100.0):
            raise InputError(f"temperature is {self.temperature}; choose a value from 0.001 to 100, or 0 (greedy)")
        for name, low in (("top_k", 0), ("min_new_tokens", 0)):
            if getattr(self, name) < low:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p is {self.top_p}; choose a mass above 0 and at most 1")
        if not 0.0 <= self.min_p < 1.0:
            raise InputError(f"min_p is {self.min_p}; choose a share of at least 0 and below 1")
        if not 0.0 < self.repetition_penalty < math.inf:
            raise InputError(f"repetition_penalty is {self.repetition_penalty}; it must be a number above 0")
        if self.min_new_tokens and not self.end_ids:
            raise InputError(f"min_new_tokens is {self.min_new_tokens} without end tokens; name them in end_ids")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken, without noise."""
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p remove anything."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def full(self) -> "SamplingLaw":
        """The law before top-k, top-p and min-p: every token keeps its probability."""
        return replace(self, top_k=0, top_p=1.0, min_p=0.0)

    @property
    def reads_history(self) -> bool:
        """Whether `Context.seen` is needed."""
        return self.repetition_penalty != 1.0

    def tempered(
        self, logits: Float[Array, "n v"], context: Context, token_ids: Int[Array, "*n v"]
    ) -> Float[Array, "n v"]:
        """Log-law after steps 1 to 3; arguments as of `scaled`."""
        return jax.nn.log_softmax(self.scaled(logits, context, token_ids), axis=-1)

    def scaled(
        self, logits: Float[Array, "n v"], context: Context, token_ids: Int[Array, "*n v"]
    ) -> Float[Array, "n v"]:
        """What the softmax of step 3 is taken of.

        Column `i` of the logits is vocabulary entry `token_ids[i]`, or `token_ids[n, i]` where each token has its own.
        """
        token_ids = token_ids if token_ids.ndim == 2 else token_ids[None]
        if self.reads_history:
            if context.seen is None:
                raise ValueError("a repetition penalty needs Context.seen")
            scaled = jnp.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
            logits = jnp.where(_columns(context.seen, token_ids), scaled, logits)
        if self.forbidden:
            logits = jnp.where(_among(token_ids, self.forbidden), -jnp.inf, logits)
        if self.min_new_tokens:
            early = context.position < self.min_new_tokens
            logits = jnp.where(early[:, None] & _among(token_ids, self.end_ids), -jnp.inf, logits)
        return logits * (1.0 if self.greedy else 1.0 / self.temperature)

    def threshold(self, tempered: Float[Array, "n v"]) -> Float[Array, "n"]:
        """A tempered log-probability between the support and what is dropped; -inf where everything remains.

        It lies midway between the least probable token kept and the most probable one dropped: in another
        program, or after an update, both are off by a little, and the support stays what it was.
        """
        least = jnp.full(tempered.shape[:1], -jnp.inf, tempered.dtype)
        if 0 < self.top_k < tempered.shape[1]:
            least = lax.top_k(tempered, self.top_k)[0][:, -1]
        if self.top_p < 1.0:
            ordered = -jnp.sort(-tempered, axis=1)
            mass = jnp.where(ordered >= least[:, None], jnp.exp(ordered), 0.0)
            before = jnp.cumsum(mass, axis=1) - mass
            needed = (before < self.top_p * jnp.sum(mass, axis=1, keepdims=True)) & (mass > 0)
            least = jnp.min(jnp.where(needed, ordered, jnp.inf), axis=1)
        if self.min_p > 0.0:
            least = jnp.maximum(least, jnp.max(tempered, axis=1) + math.log(self.min_p))
        kept = tempered >= least[:, None]
        lowest = jnp.min(jnp.where(kept, tempered, jnp.inf), axis=1)
        dropped = jnp.max(jnp.where(kept, -jnp.inf, tempered), axis=1)
        midway = lowest + 0.5 * (jnp.where(dropped == -jnp.inf, lowest, dropped) - lowest)
        return jnp.where(dropped == -jnp.inf, dropped, jnp.where(midway > dropped, midway, lowest))

    def restrict(
        self, tempered: Float[Array, "n v"], least: Float[Array, "n"], token: Int[Array, "n"] | None = None
    ) -> Float[Array, "n v"]:
        """The tempered law on its support, scaled to sum to 1, -inf elsewhere.

        Args:
            tempered: from `tempered`.
            least: from `threshold`, or as it was at rollout.
            token: belongs to the support whatever its probability is now.
        """
        if not self.filtered:
            return tempered
        inside = tempered >= least[:, None]
        if token is not None:
            inside |= jax.nn.one_hot(token, tempered.shape[1], dtype=bool)
        kept = jnp.where(inside, tempered, -jnp.inf)
        return kept - jax.nn.logsumexp(kept, axis=1, keepdims=True)

    def log_law(
        self, logits: Float[Array, "n v"], context: Context, token_ids: Int[Array, "*n v"]
    ) -> Float[Array, "n v"]:
        """Log-probabilities of the next token after all steps."""
        tempered = self.tempered(logits, context, token_ids)
        return self.restrict(tempered, self.threshold(tempered))

    def draw(
        self,
        logits: Float[Array, "n v"],
        keys: UInt32[Array, "n 2"],
        context: Context,
        token_ids: Int[Array, "v"],
        noisy: bool = True,
    ) -> tuple[Int[Array, "n"], Float[Array, "n"], Float[Array, "n"]] | None:
        """Column of a token drawn with the noise of its position, its log-probability, and the law's entropy.

        None where there is no kernel for it. Without noise the most probable token is drawn.
        """
        if not self._has_kernel(logits):
            return None
        from specrl_jax.kernels import draw

        words = noise_words(keys, context.position) if noisy and not self.greedy else None
        return draw.draw(self.scaled(logits, context, token_ids), token_ids, words)

    def draw_several(
        self,
        logits: Float[Array, "n v"],
        keys: UInt32[Array, "n 2"],
        context: Context,
        token_ids: Int[Array, "v"],
        count: int,
        noisy: bool = True,
    ) -> tuple[Int[Array, "n c"], Float[Array, "n c"]] | None:
        """Columns of the `count` best of a draw, the best first, and what each has of the law without those before it.

        None where there is no kernel for it. The log-probability of one that the law forbids is not above -inf.
        """
        found, own = [], jnp.arange(logits.shape[0], dtype=jnp.int32)
        for _ in range(count):
            drawn = self.draw(logits, keys, context, token_ids, noisy)
            if drawn is None:
                return None
            found.append(drawn[:2])
            logits = logits.at[own, drawn[0]].set(-jnp.inf)
        columns, log_probs = zip(*found, strict=True)
        return jnp.stack(columns, axis=1), jnp.stack(log_probs, axis=1)

    def _has_kernel(self, logits: Float[Array, "n v"]) -> bool:
        """Whether laws over so many tokens are read by a kernel."""
        if not on_a_cpu() or self.filtered or compiler_splits() or logits.dtype != jnp.float32:
            return False
        from specrl_jax.kernels import draw

        return draw.fits(logits.shape[1])

    def whole_by_kernel(
        self, logits: Float[Array, "n v"], context: Context, token_ids: Int[Array, "v"]
    ) -> Float[Array, "n v"]:
        """`log_law` with the bits of `draw`, which must have a kernel."""
        from specrl_jax.kernels import draw

        scaled = self.scaled(logits, context, token_ids)
        return beside_kernels(_normalised, (scaled, draw.draw(scaled, token_ids, None)[1]))

    def describe(
        self, logits: Float[Array, "n v"], columns: Int[Array, "n"], context: Context, token_ids: Int[Array, "v"]
    ) -> tuple[Float[Array, "n"], Float[Array, "n"]] | None:
        """Log-probability of given columns and the law's entropy, with the bits of `draw`; None where it has none."""
        if not self._has_kernel(logits):
            return None
        from specrl_jax.kernels import draw

        return draw.describe(self.scaled(logits, context, token_ids), columns)

    def perturbed(
        self,
        scores: Float[Array, "n v"],
        keys: UInt32[Array, "n 2"],
        positions: Int[Array, "n"],
        token_ids: Int[Array, "*n v"],
    ) -> Float[Array, "n v"]:
        """Log-probabilities (up to a constant) plus noise, whose argmax is a draw; as they are at temperature 0."""
        return scores if self.greedy else scores + gumbel_noise(keys, positions, token_ids)


def with_tokens(seen: Bool[Array, "r v"], tokens: Int[Array, "r q"], which: Bool[Array, "r q"]) -> Bool[Array, "r v"]:
    """`seen` and the tokens of each row that `which` names."""
    rows = jnp.arange(seen.shape[0], dtype=jnp.int32)[:, None]
    return seen.at[rows, jnp.where(which, tokens, seen.shape[1])].set(True, mode="drop")


def _normalised(scaled: Float[Array, "n v"], of_best: Float[Array, "n"]) -> Float[Array, "n v"]:
    """A log-law from the log-probability of its most probable token."""
    return scaled - jnp.max(scaled, axis=1, keepdims=True) + of_best[:, None]


def _columns(seen: Bool[Array, "n all"], token_ids: Int[Array, "m v"]) -> Bool[Array, "n v"]:
    """Entries of every row; `m` is 1 where they are the same in all of them."""
    return seen[:, token_ids[0]] if token_ids.shape[0] == 1 else jnp.take_along_axis(seen, token_ids, axis=1)


def _among(token_ids: Int[Array, "m v"], wanted: tuple[int, ...]) -> Bool[Array, "m v"]:
    return jnp.isin(token_ids, jnp.asarray(wanted, token_ids.dtype))


@struct.dataclass
class TokenLaw:
    """What is kept of the law at one token.

    token: drawn (or given) token, `[n]`.
    log_prob: its log-probability, `[n]` float32.
    entropy: of the whole law in nats, `[n]` float32.
    threshold: tempered log-probability above which the support lies, `[n]` float32.
    """

    token: Int[Array, "n"]
    log_prob: Float[Array, "n"]
    entropy: Float[Array, "n"]
    threshold: Float[Array, "n"]


def _describe(log_law: Float[Array, "n v"], token: Int[Array, "n"], threshold: Float[Array, "n"]) -> TokenLaw:
    # A sum, not a gather: the vocabulary may be split over devices.
    chosen = jnp.arange(log_law.shape[1], dtype=jnp.int32)[None] == token[:, None]
    log_prob = jnp.sum(jnp.where(chosen, log_law, 0.0), axis=1)
    entropy = -jnp.sum(jnp.exp(log_law) * jnp.maximum(log_law, -1e30), axis=-1)
    return TokenLaw(token, log_prob, entropy, threshold)


def _sample_block(
    config: PolicyConfig,
    law: SamplingLaw,
    keep_law: bool,
    invariant: bool,
    weights: tuple[Array, Array],
    hidden: Float[Array, "n d"],
    keys: UInt32[Array, "n 2"],
    *context: Array,
) -> tuple[TokenLaw, Float[Array, "n v"] | None]:
    logits = token_logits(config, weights, hidden)
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    by_kernel = in_kernels_alone() or not (keep_law or invariant)
    drawn = law.draw(logits, keys, Context(*context), ids) if by_kernel else None
    if drawn is not None:
        log_law = law.whole_by_kernel(logits, Context(*context), ids) if keep_law else None
        return TokenLaw(*drawn, jnp.full(logits.shape[:1], -jnp.inf, jnp.float32)), log_law
    # Scaled outside, lest a product be fused with what is subtracted from it in one program and not in another.
    scaled = law.scaled(logits, Context(*context), ids)
    return beside_kernels(functools.partial(_draw, law, keep_law), (scaled, keys, context[0]))


def _draw(
    law: SamplingLaw,
    keep_law: bool,
    scaled: Float[Array, "n v"],
    keys: UInt32[Array, "n 2"],
    positions: Int[Array, "n"],
) -> tuple[TokenLaw, Float[Array, "n v"] | None]:
    tempered = jax.nn.log_softmax(scaled, axis=-1)
    threshold = law.threshold(tempered)
    log_law = law.restrict(tempered, threshold)
    token = best(law.perturbed(log_law, keys, positions, jnp.arange(scaled.shape[1], dtype=jnp.int32)))[:, 0]
    return _describe(log_law, token, threshold), (log_law if keep_law else None)


def _score_block(
    config: PolicyConfig,
    law: SamplingLaw,
    weights: tuple[Array, Array],
    hidden: Float[Array, "n d"],
    tokens: Int[Array, "n"],
    thresholds: Float[Array, "n"],
    *context: Array,
) -> TokenLaw:
    logits = token_logits(config, weights, hidden)
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    described = law.describe(logits, tokens, Context(*context), ids) if in_kernels_alone() else None
    if described is not None:
        return TokenLaw(tokens, *described, thresholds)
    scaled = law.scaled(logits, Context(*context), ids)
    return beside_kernels(functools.partial(_score, law), (scaled, tokens, thresholds))


def _score(
    law: SamplingLaw, scaled: Float[Array, "n v"], tokens: Int[Array, "n"], thresholds: Float[Array, "n"]
) -> TokenLaw:
    log_law = law.restrict(jax.nn.log_softmax(scaled, axis=-1), thresholds, tokens)
    return _describe(log_law, tokens, thresholds)


def sample_tokens(
    params: PolicyParams,
    config: PolicyConfig,
    law: SamplingLaw,
    hidden: Float[Array, "n d"],
    keys: UInt32[Array, "n 2"],
    context: Context,
    numerics: Numerics,
    *,
    keep_law: bool = False,
) -> tuple[TokenLaw, Float[Array, "n v"] | None]:
    """Draw the next token of every hidden state with the noise of its response position.

    With `keep_law` the whole log-law is returned too, for rules that judge drafts by it.
    """
    block = functools.partial(_sample_block, config, law, keep_law, numerics.invariant)
    seen = () if context.seen is None else (context.seen,)
    return map_tokens(block, head_weights(params), (hidden, keys, context.position, *seen), numerics)


def score_tokens(
    params: PolicyParams,
    config: PolicyConfig,
    law: SamplingLaw,
    hidden: Float[Array, "n d"],
    tokens: Int[Array, "n"],
    thresholds: Float[Array, "n"],
    position: Int[Array, "n"],
    sequences: Int[Array, "b t"],
    numerics: Numerics,
    chunk: int,
) -> TokenLaw:
    """Log-probability of given next tokens under the same law, on the support that the rollout stored.

    A given token belongs to its support even where its probability has since fallen below the threshold.
    The laws of at most `chunk` tokens exist at a time, in the gradient too.

    Args:
        position: index of the given token in its response.
        sequences: tokens of all slots, of which the hidden states are those one after another, `n = b * t`.
    """
    block = functools.partial(_score_block, config, law)

    def one(weights: Any, index: Int[Array, "c"], *inputs: Array) -> TokenLaw:
        head, sequences = weights
        seen = (_seen(sequences, index, config.vocab_size),) if law.reads_history else ()
        return map_tokens(block, head, (*inputs, *seen), numerics)

    inputs = (jnp.arange(hidden.shape[0], dtype=jnp.int32), hidden, tokens, thresholds, position)
    return in_chunks(one, (head_weights(params), sequences), inputs, chunk)


def _seen(sequences: Int[Array, "b t"], index: Int[Array, "n"], vocab_size: int) -> Bool[Array, "n v"]:
    """Vocabulary entries up to some slots of their sequences; slots are numbered through all sequences."""
    row, slot = jnp.divmod(index, sequences.shape[1])
    there = jnp.arange(sequences.shape[1], dtype=jnp.int32)[None] <= slot[:, None]
    own = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros((index.shape[0], vocab_size), bool).at[own, sequences[row]].max(there)
