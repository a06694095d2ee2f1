"""Does a policy's checkpoint load as meant, and does its draft head draft as it should?

`python -m experiments.check_checkpoint --policy P --drafter D` compares the policy's logits with those of transformers
(where torch is installed), lets the policy answer 32 built-in prompts with drafts of the head, and says how many are
accepted at every depth, beside published figures where there are any. Then it looks for what was wrong with
checkpoints before:

- boundaries: the head reads the policy's layers one off.
- feedback: the head's own hidden state is fed back before its final norm instead of after it, or the reverse.
- halves: embedding and hidden state are swapped in what its attention reads.
- rope: its positions stop (at 2048, say), so that it drafts worse behind them; shown by a prompt of 4096 tokens.
- tokenizer: the text is another tokenizer's than the policy's or the head's.

The first three are found by reading the head otherwise than its folder says: a fault is named where that accepts 0.01
more of the drafts, and by more than three standard errors over the responses. Positions stop where the head drafts 0.03
better when it counts them anew behind the middle of the prompt (or its max_position_embeddings), but not before. A
tokenizer is another's where text is not half a nat per token likelier than its tokens renamed, or costs more than by
the frequencies of its bytes. A head that drafts no better than the frequencies of tokens is said to be of no use. Of
other drafters than EAGLE-3 and MTP heads, only acceptance and tokenizer are looked at, and the verdict says so. Exit
status 0: nothing was found; 1: something was, and all results are written; 2: the input cannot be used.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import checkpoint_parity as parity
from experiments.checkpoint_readings import (
    as_sequences,
    frequency_overlap,
    mean_log_probs,
    overlap,
    readings,
    window_overlap,
)
from experiments.checkpoint_texts import Encoded, byte_costs, encode, long_rows, renamed
from experiments.checkpoint_verdict import Finding, judge_length, judge_readings, judge_tokenizer, published, row
from experiments.common import Run, RunOptions, check_least, run_main
from experiments.inference import Model, ModelFlags, ModelOptions, open_model
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from specrl_jax.drafters.eagle3 import LayerDrafter
from specrl_jax.drafters.heads import tokenizer_difference
from specrl_jax.errors import InputError
from specrl_jax.models.numerics import Numerics
from specrl_jax.models.policy import forward, grid_batch, logits, sequence_positions
from specrl_jax.rollout.config import RolloutConfig
from specrl_jax.rollout.engine import RolloutEngine
from specrl_jax.rollout.sampling import SamplingLaw
from specrl_jax.rollout.trajectory import Sequences, Trajectory, to_sequences
from specrl_jax.training.metrics import write_json
from specrl_jax.training.sampling import Sampler, sample_all
from specrl_jax.training.speculation import acceptance_figures
from specrl_jax.training.workloads import end_ids

SCRIPT = "check_checkpoint"
Judged = tuple[list[Any], list[Finding]]
# Tokens of a long prompt with room for windows, and drafts measured in them.
_SHORTEST, _LONG_DRAFTS = 128, 3


@dataclass(frozen=True)
class Config:
    """Options of a check."""

    run: Run = RunOptions()
    model: ModelFlags = ModelOptions()
    samples: int = 1
    """Responses to each of the built-in prompts."""
    max_new_tokens: int = 128
    draft_length: int = 7
    temperature: float = 1.0
    """Of the responses; 0 is greedy. Readings are compared at temperature 1."""
    long_prompt: int = 4096
    """Tokens of the prompt that shows whether positions stop; 0 to leave that out."""
    rows: int = 4
    """Sequences measured together."""

    def __post_init__(self) -> None:
        check_least("", self, samples=1, draft_length=1, rows=1, long_prompt=0)
        if 0 < self.long_prompt < _SHORTEST:
            raise InputError(f"--long-prompt is {self.long_prompt}; give at least {_SHORTEST} tokens, or 0 for none")
        _ = SamplingLaw(self.temperature)

    @property
    def mesh(self) -> str:
        """Devices asked for."""
        return self.model.mesh


SMOKE = {"max_new_tokens": 16, "draft_length": 2, "long_prompt": 128}
PRESETS: dict[str, Mapping[str, Any]] = {"default": {}, "smoke": SMOKE}


def check_parity(config: Config, model: Model, encoded: Encoded) -> Judged:
    """The policy beside transformers, on the first texts."""
    if config.model.policy is None:
        return [], []
    sequences = as_sequences(list(encoded.texts[: config.rows]))
    theirs = parity.their_logits(config.model.policy, model.policy.dtype, np.asarray(sequences.tokens))
    if isinstance(theirs, str):
        print(f"logits are not compared with those of transformers: {theirs}")
        return [row("policy", f"not compared: {theirs}", None)], []

    @jax.jit
    def run(params: Any, sequences: Sequences) -> Any:
        positions = sequence_positions(sequences.lengths, sequences.tokens.shape[1])
        out = forward(params, model.policy, grid_batch(sequences.tokens, positions), numerics=Numerics("plain"))
        return logits(params, model.policy, out.hidden, Numerics("plain"))

    slots = np.arange(sequences.tokens.shape[1])[None] < np.asarray(sequences.lengths)[:, None]
    ours = np.asarray(run(model.params, sequences)).reshape(*slots.shape, -1)
    return parity.judge_parity(model.policy, ours[slots], theirs[slots])


def check_tokenizer(config: Config, model: Model, encoded: Encoded) -> Judged:
    """The tokenizer of policy and head by what they say, and by what the policy thinks of text."""
    assert model.params is not None
    score = partial(mean_log_probs, model.policy, model.params, rows=config.rows)
    special = set(model.tokenizer.all_special_ids)
    names = [renamed(encoded, special, seed) for seed in range(4)]
    nonsense = np.mean([score(as_sequences(list(rows), encoded.answer_at)) for rows in names], axis=0)
    text = score(as_sequences(list(encoded.texts), encoded.answer_at))
    lengths = np.array([len(row) - at for row, at in zip(encoded.texts, encoded.answer_at, strict=True)])
    cost = -text * lengths / np.array([len(answer.encode()) for answer in encoded.answers])
    rows, found = judge_tokenizer(text, nonsense, cost, byte_costs(encoded.answers))
    apart = tokenizer_difference(config.model.drafter, model.tokenizer) if config.model.drafter else None
    if apart is not None:
        sentence = f"tokenizer: the head was made for another one: {apart}; give the head of this policy"
        found = [Finding("tokenizer", sentence), *found]
    return rows, found


def rolled_out(config: Config, model: Model, encoded: Encoded) -> Trajectory:
    """The policy's responses to the built-in prompts, drafted by the head."""
    law = SamplingLaw(config.temperature, end_ids=end_ids(model.tokenizer))
    settings = RolloutConfig(config.max_new_tokens, config.samples, config.draft_length, law)
    engine = RolloutEngine(model.policy, settings, model.numerics, model.drafter)
    engine.check_prompt_width(encoded.prompts.tokens.shape[1])
    batch = len(encoded.prompts.lengths)
    sampler = Sampler(engine, model.mesh, "evaluation", config.run.seed, batch)
    assert model.params is not None
    return sample_all(sampler, model.params, model.draft, encoded.prompts)


def acceptance_rows(config: Config, model: Model, trajectory: Trajectory) -> list[Any]:
    """Rows of acceptance: of the draft at every depth, and the length that drafts up to there make."""
    figures = acceptance_figures(trajectory)
    known = published(config.model.drafter or "", model.policy, config.temperature)
    rows, length = [], 1.0
    rounds = max(int(trajectory.stats.rounds), 1)
    for depth, share in enumerate(figures["survival_per_position"] or [], start=1):
        length += share
        theirs = known.lengths.get(depth) if known else None
        error = float(np.sqrt(share * (1 - share) / rounds))
        rows.append(row("acceptance", f"draft {depth}", share, error))
        of = f"published: {known.source}" if known and theirs else None
        rows.append(row("acceptance", f"length with {depth} drafts", length, None, theirs, of))
    return rows


def check_readings(config: Config, model: Model, trajectory: Trajectory) -> Judged:
    """The head, read as its folder says and otherwise, on the policy's own responses."""
    if not isinstance(model.drafter, LayerDrafter):
        return [row("readings", "not judged: neither an EAGLE-3 nor an MTP head", None)], []
    assert model.params is not None
    draft: Any = model.draft
    sequences = to_sequences(jax.tree.map(jnp.asarray, trajectory))
    kept = np.flatnonzero(np.asarray(trajectory.lengths) > config.draft_length + 1)
    if len(kept) < 2:
        raise InputError(
            f"{len(kept)} responses are longer than --draft-length {config.draft_length}, too few to compare readings; "
            "lower it, or raise --samples or --max-new-tokens"
        )
    sequences = jax.tree.map(lambda x: x[kept], sequences)
    ways = readings(model.drafter.config, draft, model.policy.num_layers)
    steps, rows = config.draft_length, config.rows
    found = [overlap(model.policy, model.params, way, sequences, steps, rows) for way in ways]
    frequencies = frequency_overlap(model.policy, model.params, draft.target_ids, sequences, rows)
    return judge_readings(ways, found, frequencies)


def check_length(config: Config, model: Model, encoded: Encoded) -> Judged:
    """The head before and behind the position at which its own may stop."""
    length = config.long_prompt
    if not length or not isinstance(model.drafter, LayerDrafter):
        return [], []
    if length > model.policy.max_position_embeddings:
        most = model.policy.max_position_embeddings
        return [row("long prompt", f"not measured: the policy ends at {most} of {length} tokens", None)], []
    assert model.params is not None
    configured = model.drafter.config.max_position_embeddings
    end = configured if config.long_prompt // 4 <= configured < length else length // 2
    tokens = long_rows(encoded, config.rows, length, config.run.seed)
    draft: Any = model.draft
    loaded = readings(model.drafter.config, draft, model.policy.num_layers)[0]
    steps = min(config.draft_length, _LONG_DRAFTS)
    windows = window_overlap(model.policy, model.params, loaded, tokens, (end, length), length // 8, steps)
    return judge_length(windows, end, length, configured)


def verdict_of(config: Config, model: Model, found: list[Finding]) -> str:
    """What was found, in words."""
    if config.model.policy is None:
        return "none, policy and head are random; give --policy and --drafter"
    if not found:
        judged = isinstance(model.drafter, LayerDrafter)
        return "no fault found" if judged else "no fault found, but how this drafter reads was not judged"
    return "; also ".join(finding.sentence for finding in found)


def main(config: Config) -> None:
    """Check everything, roll out, measure, write and print; exit status 1 where something was found."""
    check_output(config.run, SCRIPT, policy=config.model.policy, drafter=config.model.drafter)
    if config.model.drafter is None and config.model.policy is not None:
        raise InputError("--drafter is missing; give the folder or hub name of a draft head")
    model = open_model(config.model, config.run, 32, same_tokens=False)
    encoded = encode(model.tokenizer, model.policy.max_position_embeddings - config.max_new_tokens)
    out = open_output(config.run, config, SCRIPT)
    model = model.initialised(config.run.seed)
    trajectory = rolled_out(config, model, encoded)
    judged: list[Judged] = [
        check_parity(config, model, encoded),
        (acceptance_rows(config, model, trajectory), []),
        check_tokenizer(config, model, encoded),
        check_readings(config, model, trajectory),
        check_length(config, model, encoded),
    ]
    table = [entry for rows, _ in judged for entry in rows]
    found = [finding for _, findings in judged for finding in findings]
    verdict = verdict_of(config, model, found)
    source = provenance(config.run.seed) | {"policy": config.model.policy, "drafter": config.model.drafter}
    write_results(out, table, f"Check of a checkpoint: {verdict}", source)
    figures = acceptance_figures(trajectory)
    summary = {"verdict": verdict, "faults": [finding.fault for finding in found], "prompts_left_out": encoded.left_out}
    write_json(out / "summary.json", summary | figures | source)
    print(markdown_table(table))
    print(f"verdict: {verdict}", flush=True)
    if found and config.model.policy is not None:
        sys.exit(1)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
