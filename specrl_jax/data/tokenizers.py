"""Tokenizers: one token per character for arithmetic, byte-level BPE for text, or a checkpoint's own."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
ARITHMETIC_SYMBOLS = "0123456789+-*/=() \n"

# The text of a prompt passes through; an assistant's turn closes with the end token.
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


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
