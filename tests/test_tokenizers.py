"""Tokenizers against the `transformers` classes that load what they saved."""

import pytest
from transformers import AutoTokenizer

from specrl_jax.data.tokenizers import ARITHMETIC_SYMBOLS, arithmetic_tokenizer, load_tokenizer, train_bpe
from specrl_jax.errors import InputError

pytestmark = pytest.mark.ci
TEXTS = ["The bakers fill trays with rolls.", "The rolls of the bakers cost $1.50 each.\n#### 12"] * 3
PROMPT = [{"role": "user", "content": "12+34="}]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


def test_arithmetic_has_one_token_per_character():
    tokenizer = arithmetic_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    ids = tokenizer(ARITHMETIC_SYMBOLS)["input_ids"]
    assert ids == list(range(3, 3 + len(ARITHMETIC_SYMBOLS)))
    assert len(tokenizer) == 3 + len(ARITHMETIC_SYMBOLS)
    text = "12+345 = 357\n(-7)*2"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("1a2<end>")["input_ids"] == [4, tokenizer.unk_token_id, 5, 1]


def test_arithmetic_template_passes_the_prompt_through():
    turns = [*PROMPT, {"role": "assistant", "content": "46"}]
    template = arithmetic_tokenizer().apply_chat_template
    assert template(PROMPT, tokenize=False, add_generation_prompt=True) == "12+34="
    assert template(turns, tokenize=False) == "12+34=46<end>"


@pytest.mark.parametrize("text", ["", "  two  spaces\n\n\ttab", "naïve — 12,345.6 🚀", "<|user|>x<end>", "\r\n"])
def test_bpe_gives_any_text_back(bpe, text):
    assert bpe.decode(bpe(text)["input_ids"]) == text


def test_bpe_tokens_and_template(bpe):
    assert (bpe.pad_token_id, bpe.eos_token_id, len(bpe)) == (0, 1, 300)
    assert bpe.tokenize("1234") == ["1", "2", "3", "4"]
    assert len(bpe("bakers")["input_ids"]) < len("bakers")
    ids = bpe.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)
    user, assistant = bpe.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    assert (ids[0], ids[-1], len(ids)) == (user, assistant, 8)
    turns = [*PROMPT, {"role": "assistant", "content": "46"}]
    assert bpe.apply_chat_template(turns, tokenize=False) == "<|user|>12+34=<|assistant|>46<end>"


def test_bpe_is_deterministic(bpe):
    assert train_bpe(TEXTS, 300).backend_tokenizer.to_str() == bpe.backend_tokenizer.to_str()


def test_bpe_stops_where_the_texts_are_exhausted():
    assert len(train_bpe(["aa"], 400)) == 262  # five special tokens, 256 bytes and "aa"


@pytest.mark.parametrize("kind", ["arithmetic", "bpe"])
def test_saved_folder_loads_in_transformers(kind, bpe, tmp_path):
    ours = arithmetic_tokenizer() if kind == "arithmetic" else bpe
    ours.save_pretrained(tmp_path)
    for theirs in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path), load_tokenizer(str(tmp_path))):
        text = "12+34= (7)*\n<end>"
        assert theirs(text)["input_ids"] == ours(text)["input_ids"]
        assert theirs.decode(ours(text)["input_ids"]) == text
        assert (theirs.pad_token_id, theirs.eos_token_id) == (0, 1)
        assert theirs.get_vocab() == ours.get_vocab()
        rendered = [t.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True) for t in (ours, theirs)]
        assert rendered[0] == rendered[1]


def test_bpe_refuses_a_vocabulary_smaller_than_the_bytes():
    with pytest.raises(InputError, match=r"at least 261, not 260$"):
        train_bpe(TEXTS, 260)


def _one_sentence(error):
    message = str(error.value)
    assert "\n" not in message
    return message


def test_load_refuses_what_is_no_tokenizer(tmp_path):
    with pytest.raises(InputError, match="does not exist; give an existing folder") as error:
        load_tokenizer(tmp_path / "nothing")
    _one_sentence(error)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(InputError, match=r"holds no tokenizer; give a folder with a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_load_refuses_a_truncated_tokenizer(tmp_path):
    arithmetic_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text()[:200])
    with pytest.raises(InputError, match=r"cannot be read .* save or download them again") as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in _one_sentence(error)


def test_load_refuses_a_tokenizer_without_eos(tmp_path):
    tokenizer = arithmetic_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no eos token; set eos_token"):
        load_tokenizer(tmp_path)


def test_load_from_the_hub_offline():
    with pytest.raises(InputError, match="no tokenizer 'nobody/nothing' on the Hugging Face hub") as error:
        load_tokenizer("nobody/nothing")
    _one_sentence(error)
