"""Which round comes next: how many rows, how many tokens, and whose.

Speculation pays while the rows' seconds per token fall with a round's drafts. `Control` holds what
is needed to tell: seconds of every compiled round (a `Body`, known by its rows and tokens), and how
often drafts have been accepted, by the drafter's confidence, by depth and by row. It is data, not code: the
same program runs under any cost table, and a table that is saved and restored decides alike.

What is made small is the mean over rows of seconds per token: a row that expects `x` tokens of a round needs `1 / x`
rounds for each. Tokens per second of all rows together would send the drafts to the surest rows, and a batch ends
with its slowest.

1. Before a round, every body is valued by the tokens expected of each row, with the rows' records.
2. While drafting, a row's survival is the product of what drafts of that confidence have been
   accepted; drafting stops when the next draft is not worth its time.
3. The tokens of the body go to the drafts that save most, whatever row they are of.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.errors import InputError
from specrl_jax.parallel.sharding import sum_over_rows

BINS = 16
DEPTHS = 16  # deeper drafts count as the last
_MEMORY = 0.98  # of a row's record, per round; half of it is 34 rounds old
# Drafts' worth of the overall acceptance in a row's record: two or three refused drafts, which are common, must not
# end a row's drafting, since without drafts nothing is learned.
_PRIOR = 12.0
_TRUST = 8.0  # accepted drafts' worth of what the records promise, at every depth
_KEPT = 0.95  # of what was learned, from rollout to rollout
# Drafts that are taken to have been seen before any was, and accepted ones of them: a drafter that nobody has tried is
# thought well of, or none would be tried where a round is dear.
_HOPE = (32.0, 0.9 * 32.0)
_BELIEF = (np.full(BINS, 2.0), 2.0 * (np.arange(BINS) + 0.5) / BINS)  # two drafts of every confidence, judged by it
_MOST = 0.99  # no draft is taken to be surer
_SWITCH = 0.02  # another body must cost so much less before the loop is left


@dataclass(frozen=True)
class Body:
    """A compiled round. rows: at most so many. tokens: of all rows together, the newest one of each included."""

    rows: int
    tokens: int

    def depth(self, longest: int) -> int:
        """Drafts of a row at most: twice its even share, so that rows can differ."""
        spare = self.tokens - self.rows
        return min(longest, spare, max(2 * spare // self.rows, 1)) if spare else 0


def default_bodies(rows: int, longest: int) -> tuple[Body, ...]:
    """At most 12: of three sizes (all rows, about a quarter, and fewer), each with 0, 1, 3, 7 drafts a row."""
    sizes = [rows]
    while sizes[-1] > 1 and len(sizes) < 3:
        sizes.append(max(1, -(-sizes[-1] // 4)) if len(sizes) < 2 or sizes[-1] > 8 else 1)
    shares = sorted({min(share, longest) for share in (0, 1, 3, 7)})
    return tuple(Body(size, size * (1 + share)) for size in sizes for share in shares)


@struct.dataclass
class Control:
    """The controller's state.

    seconds: of a round of each body with nothing in the cache, `[n]`. per_slot: more for each token in the cache of a
        live row. per_step: of a draft step.
    drafted, accepted: verified drafts and accepted ones, by confidence, `[bins]`.
    by_depth: promised and accepted ones by depth, `[2, depths]`: what records said of those verified, and what came.
    """

    seconds: Float[Array, "n"]
    per_slot: Float[Array, ""]
    per_step: Float[Array, ""]
    drafted: Float[Array, "bins"]
    accepted: Float[Array, "bins"]
    by_depth: Float[Array, "2 depths"]


def initial_control(seconds: np.ndarray, per_slot: float = 0.0, per_step: float = 0.0) -> Control:
    """A controller that has seen nothing but a cost table; drafts are first believed as the drafter believes them."""
    if not np.all(np.asarray(seconds) > 0):
        raise InputError(f"cost table is {list(map(float, seconds))}; every entry must be a positive number of seconds")
    return Control(
        jnp.asarray(seconds, jnp.float32),
        jnp.float32(per_slot),
        jnp.float32(per_step),
        drafted=jnp.asarray(_BELIEF[0], jnp.float32),
        accepted=jnp.asarray(_BELIEF[1], jnp.float32),
        by_depth=jnp.zeros((2, DEPTHS), jnp.float32),
    )


def forget(control: Control) -> Control:
    """Before a new rollout, a twentieth of what was learned goes.

    A drafter that improves while nothing is drafted is thereby tried again some time.
    """
    drafted, accepted = (jnp.asarray(belief, jnp.float32) for belief in _BELIEF)
    return replace(
        control,
        drafted=drafted + _KEPT * (control.drafted - drafted),
        accepted=accepted + _KEPT * (control.accepted - accepted),
        by_depth=_KEPT * control.by_depth,
    )


def bin_of(confidence: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """Which bin a draft belongs to; confidence is its probability under the drafter's law."""
    return jnp.clip((confidence * BINS).astype(jnp.int32), 0, BINS - 1)


def expected_acceptance(control: Control, confidence: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """How often drafts of such confidence have been accepted."""
    return (control.accepted / control.drafted)[bin_of(confidence)]


def overall_acceptance(control: Control) -> Float[Array, ""]:
    """How often drafts have been accepted, hope included."""
    return (jnp.sum(control.accepted) + _HOPE[1]) / (jnp.sum(control.drafted) + _HOPE[0])


def _entry_of(depth: Int[Array, "*d"]) -> Int[Array, "*d"]:
    return jnp.minimum(depth, DEPTHS - 1)


def depth_factor(control: Control, depth: Int[Array, "*d"]) -> Float[Array, "*d"]:
    """Drafts accepted at each depth (from 0) over those that records promised: a head's guesses grow worse."""
    promised, accepted = control.by_depth
    return ((accepted + _TRUST) / (promised + _TRUST))[_entry_of(depth)]


def row_acceptance(control: Control, record: Float[Array, "r 2"]) -> Float[Array, "r"]:
    """How often drafts of each row have been accepted of late, `record` being (drafted, accepted)."""
    overall = overall_acceptance(control)
    return (record[:, 1] + _PRIOR * overall) / (record[:, 0] + _PRIOR)


def _saved(survival: Float[Array, "r k"]) -> Float[Array, "r k"]:
    """Rounds per token that each draft saves its row: `1 / x - 1 / (x + survival)`, `x` tokens expected without it."""
    before = 1.0 + jnp.cumsum(survival, axis=1) - survival
    return survival / (before * (before + survival))


def _saved_by_drafts(
    control: Control, depth: int, live: Bool[Array, "r"], record: Float[Array, "r 2"]
) -> Float[Array, "d"]:
    """Rounds per token, summed over rows, that the best 1, 2, ... drafts save, `depth` of a row, as records advise."""
    rows = jnp.where(live, row_acceptance(control, record), 0.0)
    factor = depth_factor(control, jnp.arange(depth, dtype=jnp.int32))
    acceptance = jnp.minimum(rows[:, None] * factor[None], _MOST)
    return jnp.cumsum(-jnp.sort(-_saved(jnp.cumprod(acceptance, axis=1)).reshape(-1)))


def _rounds_per_token(body: Body, saved: Float[Array, "d"], live: Bool[Array, "r"]) -> Float[Array, ""]:
    """Rounds of a body that live rows need for a token, summed over them; `saved` is of its depth."""
    count = jnp.sum(live, dtype=jnp.int32)
    drafts = jnp.clip(body.tokens - count, 0, saved.shape[0])
    gained = saved.at[drafts - 1].get(mode="clip") if saved.shape[0] else jnp.float32(0.0)
    return count.astype(jnp.float32) - jnp.where(drafts > 0, gained, 0.0)


def saved_per_second(
    control: Control, index: int, body: Body, longest: int, live: Bool[Array, "r"], record: Float[Array, "r 2"]
) -> Float[Array, ""]:
    """Rounds per token, summed over rows, that a round of body number `index` must save for a second that it lasts
    longer; without what the context costs."""
    saved = _saved_by_drafts(control, body.depth(longest), live, record)
    return _rounds_per_token(body, saved, live) / control.seconds[index]


def choose_body(
    control: Control,
    bodies: tuple[Body, ...],
    longest: int,
    live: Bool[Array, "r"],
    record: Float[Array, "r 2"],
    slots: Int[Array, ""],
    now: Int[Array, ""],
    able: Bool[Array, "r"] | None = None,
) -> Int[Array, ""]:
    """The body of the fewest expected seconds per token; the current one unless another is clearly better.

    Args:
        control, bodies, longest: cost table, what it is of, and drafts of a row at most.
        live: rows that take part. record: of every row.
        slots: tokens in their caches. now: the current body, or -1.
        able: rows that have drafts, where that is known.
    """
    drafting = live if able is None else live & able
    # Bodies of one depth share a sort.
    saved = {
        d: _saved_by_drafts(control, d, drafting, record) for d in sorted({body.depth(longest) for body in bodies})
    }
    rounds = jnp.stack([_rounds_per_token(body, saved[body.depth(longest)], live) for body in bodies])
    fits = jnp.array([body.rows for body in bodies], jnp.int32) >= jnp.sum(live)
    seconds = control.seconds + control.per_slot * slots.astype(jnp.float32)
    wait = jnp.where(fits, rounds * seconds, jnp.inf)
    best = jnp.argmin(wait).astype(jnp.int32)
    stay = (now >= 0) & (wait[now] <= wait[best] * (1.0 + _SWITCH)) & fits[now]
    return jnp.where(stay, now, best)


def worth_another_step(
    control: Control,
    survival: Float[Array, "r k"],
    step: Int[Array, ""],
    budget: Int[Array, ""],
    per_second: Float[Array, ""],
) -> Bool[Array, ""]:
    """Whether one more draft of every row, after `step` of them, is worth its time.

    The next drafts survive a little less than the last. No more than `budget` are verified, so that what they save is
    what they add to the best of `survival` (0 for drafts not made). per_second: what they must save for every second.
    """
    acceptance = overall_acceptance(control) * depth_factor(control, step)
    after = jnp.minimum(acceptance, _MOST) * survival[:, step - 1]
    saved = _saved(jnp.concatenate([survival, after[:, None]], axis=1))
    drafted, further = saved[:, :-1].reshape(-1), saved[:, -1]
    kept = jnp.sort(-jnp.concatenate([drafted, further]))[: drafted.shape[0]] - jnp.sort(-drafted)
    gain = -jnp.sum(jnp.where(jnp.arange(kept.shape[0], dtype=jnp.int32) < budget, kept, 0.0))
    return gain > per_second * control.per_step


def allocate(survival: Float[Array, "r k"], budget: Int[Array, ""]) -> Int[Array, "r"]:
    """Drafts of each row, `budget` in all: those that save most. Survival falls along a row; 0 is no draft."""
    flat = _saved(survival).reshape(-1)
    rank = jnp.argsort(jnp.argsort(-flat, stable=True), stable=True)
    taken = (rank < budget) & (flat > 0.0)
    return jnp.sum(taken.reshape(survival.shape), axis=1, dtype=jnp.int32)


def share(survival: Float[Array, "r k"], budget: Int[Array, ""]) -> Int[Array, "r"]:
    """Drafts of each row, as many for all of them as `budget` gives; none of survival 0. What `allocate` is against."""
    made = jnp.sum(survival > 0.0, axis=1, dtype=jnp.int32)
    return jnp.minimum(made, budget // jnp.maximum(jnp.sum(made > 0, dtype=jnp.int32), 1))


def fade(record: Float[Array, "r 2"]) -> Float[Array, "r 2"]:
    """A row's record after a round without drafts: what is known of it grows old, and drafts are tried again."""
    return record * _MEMORY


def learn(
    control: Control,
    record: Float[Array, "r 2"],
    confidence: Float[Array, "r k"],
    lengths: Int[Array, "r"],
    accepted: Int[Array, "r"],
    counted: Bool[Array, "r"],
) -> tuple[Control, Float[Array, "r 2"]]:
    """What a round's verified drafts say: those accepted, and the first that was not.

    Args:
        control, record: before the round.
        confidence: of every draft. lengths: drafts of each row. accepted: how many of them were.
        counted: rows whose round was not cut short.
    """
    depth = jnp.arange(confidence.shape[1], dtype=jnp.int32)[None]
    judged = counted[:, None] & (depth < lengths[:, None]) & (depth <= accepted[:, None])
    yes = judged & (depth < accepted[:, None])
    one_hot = jax.nn.one_hot(bin_of(confidence), BINS)

    def total(which: Bool[Array, "r k"]) -> Float[Array, "bins"]:
        return jnp.sum(jnp.where(which[..., None], one_hot, 0.0), axis=(0, 1))

    promised = jnp.where(judged, row_acceptance(control, record)[:, None], 0.0)
    both = jnp.stack([jnp.sum(promised, axis=0), jnp.sum(yes, axis=0, dtype=jnp.float32)])
    control = replace(
        control,
        drafted=control.drafted + total(judged),
        accepted=control.accepted + total(yes),
        by_depth=control.by_depth.at[:, _entry_of(depth[0])].add(both),
    )
    seen = jnp.stack([jnp.sum(judged, axis=1), jnp.sum(yes, axis=1)], axis=1).astype(jnp.float32)
    return control, record * _MEMORY + seen


def merge(before: Control, after: Control) -> Control:
    """What the devices of a mesh learned in a rollout, together; all of them began with `before`."""
    before = forget(before)

    def counts(control: Control) -> tuple[Array, Array, Array]:
        return control.drafted, control.accepted, control.by_depth

    learned = sum_over_rows(jax.tree.map(jnp.subtract, counts(after), counts(before)))
    drafted, accepted, by_depth = jax.tree.map(jnp.add, counts(before), learned)
    return replace(before, drafted=drafted, accepted=accepted, by_depth=by_depth)
