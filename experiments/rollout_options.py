"""Options of every script that rolls out: the sampling law, and how drafts are made and judged."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from specrl_jax.drafters.combined import CombinedDrafter
from specrl_jax.drafters.heads import DraftModel
from specrl_jax.drafters.protocol import ChainDrafter, most_drafts
from specrl_jax.drafters.suffix import SuffixDrafter
from specrl_jax.errors import InputError
from specrl_jax.rollout.rules import Block, Match, Ratio, Rule
from specrl_jax.rollout.sampling import SamplingLaw

MOST_DRAFTS = 7
Drafts = Literal["head", "ngram", "suffix", "head+suffix"]


def drafter_for(drafts: Drafts, head: DraftModel | None) -> ChainDrafter | None:
    """What proposes drafts of a kind; None where it needs a head and there is none."""
    text = SuffixDrafter(siblings=drafts != "ngram")
    if drafts == "head" or (drafts == "head+suffix" and head is None):
        return head
    return CombinedDrafter(head, text) if drafts == "head+suffix" and head is not None else text


@dataclass(frozen=True)
class LawOptions:
    """The law that responses are drawn from, in the order in which it is made."""

    repetition_penalty: float = 1.0
    """Logits of tokens that occurred before are divided by it where positive, multiplied where negative; 1: none."""
    forbidden: tuple[int, ...] = ()
    """Ids of tokens that are never drawn."""
    min_new_tokens: int = 0
    """No end token before so many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the so many most probable tokens; 0: all."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this mass."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the most probable one's probability."""

    def law(self, end_ids: tuple[int, ...], temperature: float | None = None) -> SamplingLaw:
        """The law of a policy with these end tokens; InputError when an option is out of range."""
        return SamplingLaw(
            temperature=self.temperature if temperature is None else temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            forbidden=self.forbidden,
            min_new_tokens=self.min_new_tokens,
            end_ids=end_ids,
        )


@dataclass(frozen=True)
class SpeculationOptions:
    """How drafts are made and judged."""

    draft_length: int | Literal["auto"] = "auto"
    """Drafts per round on the longest path, 0 for none. auto: in a GRPO run costs and acceptance choose them while it
    runs, of chains or combs under rule match, of chains under other rules with --costs; elsewhere 3, or what the
    drafter was made for if that is less."""
    most_drafts: int = MOST_DRAFTS
    """Drafts of a row at most where a controller chooses; fewer of a drafter that was made for fewer."""
    costs: str | None = None
    """Cost table of the controller in place of a measured one: `costs.json` of an earlier GRPO run of the same models,
    law, numerics, most drafts, branches and rows on a device. Under other rules than match the numbers of drafts decide
    which tokens are drawn, so that a controller takes no table there but a given one (that of a match run serves; it
    prices no reading of laws)."""
    drafts: Drafts = "head"
    """head: of a draft head; ngram: from the prompt and the response itself; suffix: from the other responses to the
    prompt too, those of earlier epochs included; head+suffix: of whichever is surer."""
    rule: Literal["match", "ratio", "block"] = "match"
    """match: the tokens of the run without speculation; ratio, block: its law. At temperature 0 all are greedy."""
    branches: int = 1
    """Candidates below a node; above 1 drafts are trees (rule match). A controller drafts the other candidates where
    they pay; in invariant numerics it chooses among chains alone, and trees have three drafts a path."""
    tree: Literal["comb", "full"] = "comb"
    """comb: only the best candidate of a depth has candidates of its own; full: all have."""
    argmax_drafts: bool = False
    """Draft the most probable tokens instead of drawing them."""
    lenience: float = 1.0
    """Rule ratio: factor by which a draft may be less probable than drafted; above 1 the law changes."""

    def __post_init__(self) -> None:
        if self.branches > 1 and self.rule != "match":
            raise InputError(f"--branches is {self.branches} with --rule {self.rule}; trees need --rule match")
        if self.lenience != 1.0 and self.rule != "ratio":
            raise InputError(f"--lenience is {self.lenience} with --rule {self.rule}; it belongs to --rule ratio")
        if self.tree == "full" and self.branches == 1:
            raise InputError("--tree is full with --branches 1, a chain; choose more branches")
        if not 1 <= self.most_drafts <= 64:
            raise InputError(f"--most-drafts is {self.most_drafts}; choose 1 to 64, or --draft-length 0 for no drafts")
        if self.most_drafts != MOST_DRAFTS and not self.adaptive:
            raise InputError(
                f"--most-drafts {self.most_drafts} is for --draft-length auto, in chains or combs under --rule match, "
                "or with --costs; leave it, or what is against it, out"
            )
        if self.costs is not None and not self.adaptive:
            raise InputError(
                f"--costs {self.costs} is for --draft-length auto, in chains or combs; leave one of them out"
            )
        if self.drafts == "head+suffix" and (self.rule != "match" or self.branches > 1):
            raise InputError("--drafts head+suffix are chains under --rule match; leave out what is against it")
        _ = self.verification

    @property
    def adaptive(self) -> bool:
        """Whether a controller may choose the drafts of every round."""
        given = self.rule == "match" or self.costs is not None
        return self.draft_length == "auto" and self.tree == "comb" and given

    def drafts_with(self, drafter: Any, *, adaptive: bool) -> int:
        """Drafts per round with a drafter or without one; of a row at most, where a controller chooses."""
        if self.draft_length != "auto":
            return self.draft_length
        if drafter is None:
            return 0
        wanted, most = self.most_drafts if adaptive else 3, most_drafts(drafter)
        return wanted if most is None else min(wanted, most)

    @property
    def with_head(self) -> bool:
        """Whether a draft head takes part."""
        return self.drafts in ("head", "head+suffix")

    @property
    def with_history(self) -> bool:
        """Whether drafts are looked for in responses of earlier epochs."""
        return self.drafts in ("suffix", "head+suffix")

    def drafter(self, head: DraftModel | None) -> ChainDrafter | None:
        """What proposes drafts, the head given; None where there is none and one is needed."""
        return drafter_for(self.drafts, head)

    @property
    def verification(self) -> Rule:
        """The rule; InputError when an option is out of range."""
        if self.rule == "match":
            return Match(self.branches, self.tree, self.argmax_drafts)
        return Ratio(self.argmax_drafts, self.lenience) if self.rule == "ratio" else Block(self.argmax_drafts)


# Their options carry no prefix on the command line.
LawFlags = Annotated[LawOptions, tyro.conf.arg(name="")]
SpeculationFlags = Annotated[SpeculationOptions, tyro.conf.arg(name="")]
