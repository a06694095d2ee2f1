"""Tokenizers: one token per character for arithmetic, byte-level BPE for text, or a checkpoint's own."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specrl_jax.errors import InputError

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
TURN_MARKERS = ("<|system|>", "<|user|>", "<|assistant|>")
ARITHMETIC_SYMBOLS = "0123456789+-*/=() \n"

# The text of a prompt passes through; an assistant's turn closes with the end token.
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
_TURNS_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of `ARITHMETIC_SYMBOLS`, after `<pad>` (id 0), `<end>` (id 1, eos) and `<unk>` (id 2)."""
    vocabulary = {token: i for i, token in enumerate((PAD, END, UNKNOWN, *ARITHMETIC_SYMBOLS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _PLAIN_TEMPLATE
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (Radford et al. 2019) trained on `texts`, with a chat template of one marker per turn.

    The text is cut by the pattern of Qwen2, which keeps every digit a token of its own. `<pad>` is id 0, `<end>`
    (eos) id 1, then the markers of the turns. Any text can be encoded, and decoding gives it back unchanged.

    Args:
        texts: training texts; the same texts in the same order give the same tokenizer.
        vocab_size: upper limit of the number of tokens, special tokens included; fewer when the texts are exhausted.

    Raises:
        InputError: `vocab_size` does not hold the 256 bytes and the special tokens.
    """
    special = [PAD, END, *TURN_MARKERS]
    least = len(special) + 256
    if vocab_size < least:
        raise InputError(f"a byte-level BPE needs a vocab_size of at least {least}, not {vocab_size}")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(TURN_MARKERS),
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TURNS_TEMPLATE
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds files of a tokenizer."""
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def shared_ids(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> int:
    """The number of ids, from 0 on, up to the last one that two tokenizers share.

    Raises:
        InputError: an id stands for different tokens.
    """
    tokens, others = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (one, other))
    both = sorted(tokens.keys() & others.keys())
    for i in both:
        if tokens[i] != others[i]:
            raise InputError(
                f"its tokenizer has {tokens[i]!r} for id {i}, and the policy's {others[i]!r}; "
                "give one with the policy's tokenizer"
            )
    return both[-1] + 1


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder or of a model on the Hugging Face hub, with its own chat template.

    Raises:
        InputError: there is none at `source`, it cannot be read, or it has no eos token.
    """
    from transformers import AutoTokenizer

    name = str(source)
    folder = Path(name).expanduser()
    if folder.exists() and not has_tokenizer(folder):
        raise InputError(f"'{name}' holds no tokenizer; give a folder with a tokenizer.json, as transformers saves it")
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise InputError(f"folder '{name}' does not exist; give an existing folder or a name on the Hugging Face hub")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if folder.exists() else name)
    except Exception as error:  # a corrupt file raises anything from KeyError to a bare Exception of the Rust library
        raise InputError(_unreadable(name, folder.exists(), error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.vocab_size <= len(tokenizer.all_special_ids):
        raise InputError(f"'{name}' has no tokenizer.json of the tokenizers library; save its fast tokenizer there")
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of '{name}' has no eos token; set eos_token in its tokenizer_config.json")
    return tokenizer


def _unreadable(name: str, is_folder: bool, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    if is_folder:
        return f"the tokenizer files in '{name}' cannot be read ({reason}); save or download them again"
    return f"no tokenizer '{name}' on the Hugging Face hub or in its cache ({reason}); check the name and the network"
