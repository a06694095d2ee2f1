"""Which round comes next: how many rows, how many tokens, and whose.

Speculation pays while the rows' seconds per token fall with a round's drafts. `Control` holds what is needed to tell:
seconds of every compiled round (a `Body`, known by its rows and tokens), and how often drafts have been accepted, by
the drafter's confidence and by depth, and candidates beside refused ones; rows keep records of their own. It is data,
not code: the same program runs under any cost table, and a table that is saved and restored decides alike.

What is made small is the mean over rows of seconds per token: a row that expects `x` tokens of a round needs `1 / x`
rounds for each. Tokens per second of all rows together would send the drafts to the surest rows, and a batch ends
with its slowest.

1. Before a round (of many rows, or without drafts, before some) every body is valued by the tokens expected of each
   row, with the rows' records (`plan_round`): that says how many rows are decoded together, whether they draft, and
   what a second is worth.
2. While drafting, a row's survival is the product of what drafts of that confidence have been
   accepted; drafting stops when the next drafts are not worth the time to make and verify them.
3. Of the bodies of so many rows the one is run whose best drafts are worth most beyond its time: sure drafts make a
   long round, doubtful ones a short round. Its tokens go to the drafts that save most, whatever row they are of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specrl_jax.errors import InputError
from specrl_jax.models.backend import backend
from specrl_jax.parallel.sharding import sum_over_rows
from specrl_jax.rollout.verification import of_each

MOST_BODIES = 12  # each is compiled
_MANY, _MANY_ON_A_CPU = 256, 64  # tokens of a round, beyond which more take their time
BINS = 16
DEPTHS = 16  # deeper drafts count as the last
_MEMORY = 0.98  # of a row's record, per round; half of it is 34 rounds old
# Drafts' worth of the overall acceptance in a row's record: two or three refused drafts, which are common, must not
# end a row's drafting, since without drafts nothing is learned.
_PRIOR = 12.0
# Accepted drafts' worth of what the records promise, at every depth: all rows begin at once, with words that are hard
# to guess, and nothing is learned by a head that these leave idle.
_TRUST = 48.0
# Of what was learned, from rollout to rollout, where it is of many drafts and where it is of few: few rows leave a
# drafter that is refused after some hundred, and would try as many as a twentieth of these anew in every rollout.
_KEPT, _KEPT_OF_FEW, _FEW = 0.95, 0.99, 512
# Drafts that are taken to have been seen before any was, and accepted ones of them: a drafter that nobody has tried is
# thought well of, or none would be tried where a round is dear.
_HOPE = (32.0, 0.9 * 32.0)
_BELIEF = (np.full(BINS, 2.0), 2.0 * (np.arange(BINS) + 0.5) / BINS)  # two drafts of every confidence, judged by it
_BELIEF_BESIDE = np.stack([np.full(BINS, 4.0), np.full(BINS, 1.0)])  # of four candidates beside a refused draft, one
_MOST = 0.99  # no draft is taken to be surer
_SWITCH = 0.02  # another body must cost so much less before it is planned, unless drafts of the current do not pay
_PLANNED = 4.0  # rounds' worth of what is planned for a row, beside the tokens that it got of late


@dataclass(frozen=True)
class Body:
    """A compiled round. rows: at most so many. tokens: of all rows together, the newest one of each included."""

    rows: int
    tokens: int

    def steps(self, longest: int, live: Int[Array, ""]) -> Int[Array, ""]:
        """Draft steps that an even share of its tokens takes, where so many rows are live."""
        return jnp.minimum(self.depth(longest), -(-(self.tokens - live) // jnp.maximum(live, 1)))

    def depth(self, longest: int) -> int:
        """Depth of a row's drafts at most: twice its even share, so that rows can differ."""
        spare = self.tokens - self.rows
        return min(longest, spare, max(2 * spare // self.rows, 1)) if spare else 0


def default_bodies(rows: int, longest: int, branches: int = 1) -> tuple[Body, ...]:
    """Of all rows, a half, a quarter and a sixteenth of them, or of four rows and fewer all and one.

    A single row's tokens double from body to body, up to eight: processors take them in tiles, so that six cost what
    eight do, and every further body is one more that a noisy cost table can favour. With more than one candidate below
    a node, of four rows and fewer a single one has a body with candidates beside half of its drafts.
    Long-tailed responses leave few rows live for long: sizes that follow them pay more than finer numbers of drafts.
    Where that makes more than `MOST_BODIES`, one is left out: most drafts of all rows where these are more tokens than
    pay (`_MANY`; a row then has at most twice an even share of the next smaller body), else the half without drafts:
    responses pass through it quickly.
    """
    shares: dict[int, tuple[int, ...]]
    if rows <= 4:
        doubled = (2**i - 1 for i in range(min(4, longest.bit_length())))
        shares = {rows: (0, 1, 2, 3, 5, longest), 1: (*doubled, longest)}
    else:
        parts = {1: (0, 1, 3, longest), 2: (0, 1, 3), 4: (0, 1, 3), 16: (0, 3, longest)}
        shares = {-(-rows // part): own for part, own in parts.items()}
    bodies = {Body(size, size * (1 + min(share, longest))) for size, own in shares.items() for share in own}
    if branches > 1 and rows <= 4:
        bodies.add(Body(1, 1 + longest * (1 + branches) // 2))
    if len(bodies) > MOST_BODIES:
        largest, half = Body(rows, rows * (1 + longest)), Body(-(-rows // 2), -(-rows // 2))
        many = _MANY_ON_A_CPU if backend() == "cpu" else _MANY
        bodies.remove(largest if largest.tokens > many else half)
    return tuple(sorted(bodies, key=lambda body: (-body.rows, body.tokens)))


@struct.dataclass
class Control:
    """The controller's state.

    seconds: of a round of each body, with one draft step where it has drafts, and nothing in the cache, `[n]`.
    per_slot: more for each token in the cache of a live row, `[n]`. per_step: of another draft step of as many rows as
        the body's, `[n]`.
    drafted, accepted: verified drafts and accepted ones, by confidence, `[bins]`.
    beside: candidates that stood beside a draft that was refused, and accepted ones, by the draft's confidence,
        `[2, bins]`.
    by_depth: promised and accepted ones by depth, `[2, depths]`: what records said of those verified, and what came.
    """

    seconds: Float[Array, "n"]
    per_slot: Float[Array, "n"]
    per_step: Float[Array, "n"]
    drafted: Float[Array, "bins"]
    accepted: Float[Array, "bins"]
    beside: Float[Array, "2 bins"]
    by_depth: Float[Array, "2 depths"]


@struct.dataclass
class Plan:
    """What the next round should be, by the rows' records.

    body: its number, or -1 where nothing has been planned. A round that drafts may verify another of as many rows.
    per_second: rounds per token, summed over rows, that a second must save.
    steps: draft steps that an even share of the body's tokens takes.
    seconds: of every body with one draft step, with what is in the cache now, `[n]`.
    """

    body: Int[Array, ""]
    per_second: Float[Array, ""]
    steps: Int[Array, ""]
    seconds: Float[Array, "n"]


def initial_control(
    seconds: np.ndarray, per_slot: np.ndarray | float = 0.0, per_step: np.ndarray | float = 0.0
) -> Control:
    """A controller that has seen nothing but a cost table; drafts are first believed as the drafter believes them."""
    if not np.all(np.asarray(seconds) > 0):
        raise InputError(f"cost table is {list(map(float, seconds))}; every entry must be a positive number of seconds")
    table = [jnp.broadcast_to(jnp.asarray(x, jnp.float32), np.shape(seconds)) for x in (seconds, per_slot, per_step)]
    return Control(
        seconds=table[0],
        per_slot=table[1],
        per_step=table[2],
        drafted=jnp.asarray(_BELIEF[0], jnp.float32),
        accepted=jnp.asarray(_BELIEF[1], jnp.float32),
        beside=jnp.asarray(_BELIEF_BESIDE, jnp.float32),
        by_depth=jnp.zeros((2, DEPTHS), jnp.float32),
    )


def forget(control: Control) -> Control:
    """Before a new rollout, a twentieth of what was learned goes, a hundredth where it is of few drafts.

    A drafter that improves while nothing is drafted is thereby tried again some time.
    """
    drafted, accepted, beside = (jnp.asarray(belief, jnp.float32) for belief in (*_BELIEF, _BELIEF_BESIDE))
    kept = jnp.where(jnp.sum(control.drafted - drafted) > _FEW, _KEPT, _KEPT_OF_FEW)
    return replace(
        control,
        drafted=drafted + kept * (control.drafted - drafted),
        accepted=accepted + kept * (control.accepted - accepted),
        beside=beside + kept * (control.beside - beside),
        by_depth=kept * control.by_depth,
    )


def bin_of(confidence: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """Which bin a draft belongs to; confidence is its probability under the drafter's law."""
    return jnp.clip((confidence * BINS).astype(jnp.int32), 0, BINS - 1)


def expected_acceptance(control: Control, confidence: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """How often drafts of such confidence have been accepted."""
    return (control.accepted / control.drafted)[bin_of(confidence)]


def chances(
    control: Control, confidence: Float[Array, "r"], above: Float[Array, "r"], candidates: int
) -> Float[Array, "r c"]:
    """How often a path goes through each candidate of a depth, where it goes through the draft before in `above`.

    confidence: of the draft, the first of the candidates; the others count where those before are refused.
    """
    first = expected_acceptance(control, confidence)
    found, left = [above * first], above * (1.0 - first)
    for _ in range(candidates - 1):
        beside = (control.beside[1] / control.beside[0])[bin_of(confidence)]
        found.append(left * beside)
        left = left * (1.0 - beside)
    return jnp.stack(found, axis=1)


def overall_acceptance(control: Control) -> Float[Array, ""]:
    """How often drafts have been accepted, hope included."""
    return (jnp.sum(control.accepted) + _HOPE[1]) / (jnp.sum(control.drafted) + _HOPE[0])


def _entry_of(depth: Int[Array, "*d"]) -> Int[Array, "*d"]:
    return jnp.minimum(depth, DEPTHS - 1)


def depth_factor(control: Control, depth: Int[Array, "*d"]) -> Float[Array, "*d"]:
    """Drafts accepted at each depth (from 0) over those that records promised: a head's guesses grow worse."""
    promised, accepted = control.by_depth
    return ((accepted + _TRUST) / (promised + _TRUST))[_entry_of(depth)]


def row_acceptance(control: Control, record: Float[Array, "r 4"]) -> Float[Array, "r"]:
    """How often drafts of each row have been accepted of late.

    `record` holds drafts that were judged and accepted ones of them, and tokens of rounds with drafts and those rounds.
    """
    overall = overall_acceptance(control)
    return (record[:, 1] + _PRIOR * overall) / (record[:, 0] + _PRIOR)


def _saved(survival: Float[Array, "r k"]) -> Float[Array, "r k"]:
    """Rounds per token that each draft saves its row: `1 / x - 1 / (x + survival)`, `x` tokens expected without it."""
    before = 1.0 + jnp.cumsum(survival, axis=1) - survival
    return survival / (before * (before + survival))


def _survival_by_record(
    control: Control, depth: int, live: Bool[Array, "r"], record: Float[Array, "r 4"]
) -> Float[Array, "r d"]:
    """How often as many drafts of each row are all accepted, as records advise."""
    rows = jnp.where(live, row_acceptance(control, record), 0.0)
    factor = depth_factor(control, jnp.arange(depth, dtype=jnp.int32))
    return jnp.cumprod(jnp.minimum(rows[:, None] * factor[None], _MOST), axis=1)


def _best(worth: Float[Array, "..."]) -> Float[Array, "n"]:
    """What the best 1, 2, ... drafts are worth together."""
    return jnp.cumsum(-jnp.sort(-worth.reshape(-1)))


def _of_best(best: Float[Array, "n"], drafts: Int[Array, ""]) -> Float[Array, ""]:
    """Entry of `_best` for so many drafts; no drafts are worth nothing."""
    if not best.shape[0]:
        return jnp.float32(0.0)
    return jnp.where(drafts > 0, best.at[drafts - 1].get(mode="clip"), 0.0)


def plan_round(
    control: Control,
    bodies: tuple[Body, ...],
    longest: int,
    live: Bool[Array, "r"],
    record: Float[Array, "r 4"],
    slots: Int[Array, ""],
    now: Int[Array, ""],
    able: Bool[Array, "r"] | None = None,
) -> Plan:
    """The body of the fewest expected seconds per token; the current one unless another is clearly better, or it has
    drafts and one without is better.

    Args:
        control, bodies, longest: cost table, what it is of, and drafts of a row at most.
        live: rows that take part. record: of every row.
        slots: tokens in their caches. now: the current body, or -1.
        able: rows that have drafts, where that is known.
    """
    drafting, count = (live if able is None else live & able), jnp.sum(live, dtype=jnp.int32)
    # Bodies of one depth share a sort.
    saved = {
        d: _best(_saved(_survival_by_record(control, d, drafting, record)))
        for d in sorted({body.depth(longest) for body in bodies})
    }
    rounds = jnp.stack(
        [count.astype(jnp.float32) - _of_best(saved[b.depth(longest)], b.tokens - count) for b in bodies]
    )
    fits = jnp.array([body.rows for body in bodies], jnp.int32) >= count
    steps = jnp.stack([body.steps(longest, count) for body in bodies])
    further = jnp.maximum(steps - 1, 0).astype(jnp.float32)
    short = control.seconds + control.per_slot * slots.astype(jnp.float32)
    seconds = short + control.per_step * further
    wait = jnp.where(fits, rounds * seconds, jnp.inf)
    best = jnp.argmin(wait).astype(jnp.int32)
    # Speculation is never slower only if no margin keeps drafts that do not pay.
    idle = jnp.min(jnp.where(steps == 0, wait, jnp.inf))
    pays = (steps[now] == 0) | (wait[now] <= idle)
    stay = (now >= 0) & fits[now] & pays & (wait[now] <= wait[best] * (1.0 + _SWITCH))
    body = jnp.where(stay, now, best)
    return Plan(body, rounds[body] / seconds[body], steps[body], short)


def worth_of_tokens(
    control: Control, depth: int, steps: Int[Array, ""], live: Bool[Array, "r"], record: Float[Array, "r 4"]
) -> Float[Array, "r"]:
    """Rounds per token that each row saves with another token a round: `1 / x ** 2`, how fast `1 / x` falls at the `x`
    tokens that it has got of late.

    For a row that is new they are what its record promises of `steps` drafts, of at most `depth`.
    """
    survival = _survival_by_record(control, depth, live, record)
    planned = 1.0 + jnp.sum(jnp.where(jnp.arange(depth, dtype=jnp.int32) < steps, survival, 0.0), axis=1)
    tokens = (record[:, 2] + _PLANNED * planned) / (record[:, 3] + _PLANNED)
    return jnp.where(live, 1.0 / tokens**2, 0.0)


def seconds_per_token(seconds: Float[Array, "n"], bodies: Sequence[tuple[int, Body]]) -> Float[Array, ""]:
    """What it costs to verify another token, from the smallest to the largest of numbered bodies of as many rows.

    seconds: of all bodies, as planned.
    """
    (first, small), (last, large) = (choose(bodies, key=lambda b: b[1].tokens) for choose in (min, max))
    if small.tokens == large.tokens:
        return jnp.float32(0.0)
    return jnp.maximum(seconds[last] - seconds[first], 0.0) / (large.tokens - small.tokens)


def worth_of_next(
    control: Control, worth: Float[Array, "r"], above: Float[Array, "r"], step: Int[Array, ""]
) -> Float[Array, "r"]:
    """What draft number `step` of each row saves, by what is known before it is drawn: the path to it survives in
    `above`, it a little less."""
    acceptance = overall_acceptance(control) * depth_factor(control, step)
    return worth * jnp.minimum(acceptance, _MOST) * above


def worth_another_step(
    control: Control,
    survival: Float[Array, "r k c"],
    worth: Float[Array, "r"],
    step: Int[Array, ""],
    budget: Int[Array, ""],
    left: Int[Array, ""],
    step_price: Float[Array, ""],
    token_price: Float[Array, ""],
) -> Bool[Array, ""]:
    """Whether one more draft of every row, after `step` of them, is worth its time.

    Of all drafts no more than `budget` are verified, the best, and only those that are worth it, so that the next ones
    are worth what they add to these.

    Args:
        survival: of drafts and of what stands beside them, 0 for those not made. worth: of a token of each row
            (`worth_of_tokens`). left: next drafts that cost nothing to verify (`room_left`).
        step_price, token_price: what another step, and a token more to verify, must save.
    """
    after = -jnp.sort(-worth_of_next(control, worth, survival[:, step - 1, 0], step))
    paid = jnp.where(jnp.arange(after.shape[0], dtype=jnp.int32) < left, 0.0, token_price)
    made = (worth[:, None] * survival.reshape(survival.shape[0], -1)).reshape(-1)
    drafted, further = jnp.maximum(made - token_price, 0.0), jnp.maximum(after - paid, 0.0)
    kept = jnp.sort(-jnp.concatenate([drafted, further]))[: drafted.shape[0]] - jnp.sort(-drafted)
    gain = -jnp.sum(jnp.where(jnp.arange(kept.shape[0], dtype=jnp.int32) < budget, kept, 0.0))
    return gain > step_price


def best_verified(
    seconds: Float[Array, "n"],
    bodies: Sequence[tuple[int, Body]],
    longest: int,
    worth: Float[Array, "r k c"],
    count: Int[Array, ""],
    per_second: Float[Array, ""],
    per_row: bool = True,
) -> Int[Array, ""]:
    """Number of the body, of numbered ones of as many rows, whose drafts save most beyond what its time must.

    All of them verify drafts, so that one is told where no draft is worth anything too.

    Args:
        seconds: of all bodies, as planned.
        worth: what each draft saves. The steps that made the drafts are over and count no more.
        count: live rows. per_second: what a second must save (`Plan`).
        per_row: the best drafts are verified (`allocate`), else as many of each row, without what stands beside them
            (`share`).
    """

    def gain(index: int, body: Body) -> Float[Array, ""]:
        drafts, budget = worth[:, : body.depth(longest)], body.tokens - count
        alike = jnp.where(share(drafts, budget), drafts, 0.0)
        gained = _of_best(_best(drafts), budget) if per_row else jnp.sum(alike)
        return gained - per_second * seconds[index]

    gains = jnp.stack([gain(index, body) for index, body in bodies])
    return jnp.array([index for index, _ in bodies], jnp.int32)[jnp.argmax(gains)]


def room_left(
    bodies: Sequence[tuple[int, Body]],
    longest: int,
    worth: Float[Array, "r k c"],
    step: Int[Array, ""],
    count: Int[Array, ""],
    chosen: Int[Array, ""],
) -> Int[Array, ""]:
    """Drafts more, after `step` of every row, that the chosen body (`best_verified`) reads in the time that it takes.

    All that are made take room, doubtful ones too.
    """
    number = jnp.argmax(jnp.array([index for index, _ in bodies], jnp.int32) == chosen)
    depth = jnp.array([body.depth(longest) for _, body in bodies], jnp.int32)[number]
    tokens = jnp.array([body.tokens for _, body in bodies], jnp.int32)[number]
    reached = jnp.arange(worth.shape[1], dtype=jnp.int32)[None, :, None] < depth
    taken = jnp.sum((worth > 0.0) & reached, dtype=jnp.int32)
    return jnp.where(step < depth, jnp.maximum(tokens - count - taken, 0), 0)


def allocate(worth: Float[Array, "r k c"], budget: Int[Array, ""]) -> Bool[Array, "r k c"]:
    """The drafts that are verified, `budget` in all: those worth most. 0 is no draft.

    Worth falls from a row's draft, the first candidate of its depth, to all candidates of the next depth. Of equals the
    shallower comes first, so that none is dealt without the drafts before.
    """
    flat = worth.reshape(-1)
    rank = jnp.argsort(jnp.argsort(-flat, stable=True), stable=True)
    return ((rank < budget) & (flat > 0.0)).reshape(worth.shape)


def share(worth: Float[Array, "r k c"], budget: Int[Array, ""]) -> Bool[Array, "r k c"]:
    """As many drafts of each row as `budget` gives, in chains; none worth 0. What `allocate` is against."""
    made = jnp.sum(worth[..., 0] > 0.0, axis=1, dtype=jnp.int32)
    lengths = jnp.minimum(made, budget // jnp.maximum(jnp.sum(made > 0, dtype=jnp.int32), 1))
    step, candidate = (jnp.arange(size, dtype=jnp.int32) for size in worth.shape[1:])
    return (step[None, :, None] < lengths[:, None, None]) & (candidate == 0)[None, None]


def fade(record: Float[Array, "r 4"]) -> Float[Array, "r 4"]:
    """A row's record after a round without drafts: what is known of it grows old, and drafts are tried again."""
    return record * _MEMORY


@struct.dataclass
class Beside:
    """tried: candidates beside a row's first refused draft that were looked at, `[r]`. accepted: whether one was it."""

    tried: Int[Array, "r"]
    accepted: Bool[Array, "r"]


def learn(
    control: Control,
    record: Float[Array, "r 4"],
    confidence: Float[Array, "r k"],
    lengths: Int[Array, "r"],
    accepted: Int[Array, "r"],
    counted: Bool[Array, "r"],
    beside: Beside | None = None,
) -> tuple[Control, Float[Array, "r 4"]]:
    """What a round's verified drafts say: those accepted, and the first that was not.

    Args:
        control, record: before the round.
        confidence: of every draft. lengths: drafts of each row in a chain. accepted: how many of them were.
        counted: rows whose round was not cut short.
        beside: what came of the candidates beside the first draft that was not accepted.
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
    tokens = accepted + 1
    if beside is not None:
        refused = of_each(confidence, jnp.minimum(accepted, confidence.shape[1] - 1))
        of_draft = jax.nn.one_hot(bin_of(refused), BINS)
        tried = jnp.where(counted, beside.tried, 0).astype(jnp.float32)
        hit = jnp.where(beside.accepted & (tried > 0), 1.0, 0.0)
        control = replace(control, beside=control.beside + jnp.stack([tried, hit]) @ of_draft)
        tokens = tokens + beside.accepted.astype(jnp.int32)
    got = [jnp.sum(judged, axis=1), jnp.sum(yes, axis=1), jnp.where(counted, tokens, 0), counted]
    seen = jnp.stack([x.astype(jnp.float32) for x in got], axis=1)
    return control, record * _MEMORY + seen


def merge(before: Control, after: Control) -> Control:
    """What the devices of a mesh learned in a rollout, together; all of them began with `before`."""
    before = forget(before)

    def counts(control: Control) -> tuple[Array, ...]:
        return control.drafted, control.accepted, control.beside, control.by_depth

    learned = sum_over_rows(jax.tree.map(jnp.subtract, counts(after), counts(before)))
    drafted, accepted, beside, by_depth = jax.tree.map(jnp.add, counts(before), learned)
    return replace(before, drafted=drafted, accepted=accepted, beside=beside, by_depth=by_depth)
