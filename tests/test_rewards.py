"""Host rewards: math-verify against verdicts given by hand, and rewards of the user's own."""

import threading

import numpy as np
import pytest

from specrl_jax.data.layouts import Example
from specrl_jax.errors import InputError
from specrl_jax.rl import rewards
from specrl_jax.rl.rewards import answer_reward, load_reward, math_reward, score

pytestmark = pytest.mark.ci

# (response, reference answer, verdict of a human reader)
VERDICTS = [
    ("She sold 48/2 = <<48/2=24>>24 in May.\n48+24 = <<48+24=72>>72 clips altogether.\n#### 72", "72", True),
    ("She sold 48/2 = 24 clips in May.\n#### 24", "72", False),
    ("The rent is paid for the whole year.\n#### $1,250", "1250", True),
    ("Working 50 minutes, she earned 0.2 x 50 = $10.", "10", True),
    ("Half of 100 is 50, so the answer is 50.", "15", False),
    (r"Dividing by 3 gives $x = \boxed{\frac{14}{3}}$.", r"\frac{14}{3}", True),
    (r"Hence $x = \boxed{4.5}$.", r"\frac{9}{2}", True),
    (r"The chance is $\boxed{\frac{2}{4}}$.", "0.5", True),
    (r"Therefore $y = \boxed{-7}$.", "7", False),
    ("At midnight the thermometer showed -12 degrees.", "-12", True),
    ("So 25% of the marbles are red.", r"25\%", True),
    (r"One third is about $\boxed{0.33}$.", r"\frac{1}{3}", False),
    (r"The side is $\boxed{2\sqrt{3}}$.", r"\sqrt{12}", True),
    (r"It factors as $\boxed{(x+1)^2}$.", "x^2+2x+1", True),
    (r"The polynomial is $\boxed{x^2+1}$.", "x^2+2x+1", False),
    (r"The wire is $\boxed{18\text{ cm}}$ long.", "18", True),
    (r"In polar form: $\boxed{\left(3, \frac{\pi}{2}\right)}$", r"\left( 3, \frac{\pi}{2} \right)", True),
    ("First, 12 * 7 = 84. Then the 16 that remained make 8", "100", False),  # cut off
    (r"The share of each is \boxed{\frac{3}{", r"\frac{3}{4}", False),  # cut off
    ("I do not know.", "3", False),
]
# Where the answer stands in a response, and in which form.
PLACES = [
    ("#### $-5", "-5", True),
    ("#### -$2,125.50", "-2125.5", True),
    ("#### 3/4", "0.75", True),
    ("#### 72 apples.", "72", True),
    ("#### 33.333...%, which rounds down\n#### 33", "33", True),
    ("#### 6\nThen 4.00 + 2.00 = 6.00, so 7", "6", True),
    ("#### 1\nWait.\n#### 2", "1", False),
    ("#### 1. Multiply\nThat gives $\\boxed{12}$.", "12", True),
    ("#### 9\nMore exactly, \\boxed{12}", "12", True),
    ("#### ", "0", False),
    (r"$\boxed{5}$. Carrying the one instead, $\boxed{6}$", "6", True),
    (r"\boxed{50\%}", r"\frac{1}{2}", True),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", True),
    ("**Answer:** 42", r"\boxed{42}", True),
    ("The final answer is $(2, 3)$.", "(3, 2)", False),
    ("", "1", False),
]


@pytest.mark.parametrize(("response", "answer", "correct"), VERDICTS + PLACES)
def test_verdicts_given_by_hand(response, answer, correct):
    assert math_reward(response, answer) == float(correct)


def test_the_table_has_twenty_answers_of_both_kinds():
    verdicts = [correct for *_, correct in VERDICTS]
    assert (len(verdicts), sum(verdicts)) == (20, 12)


def test_neighbouring_bare_boxes_are_one_set():
    # A human reader takes the second as the correction of the first. math-verify joins boxes outside of `$` with
    # fewer than 70 characters between them, as in "\boxed{5} or \boxed{6}", and judges the set of both.
    response = r"\boxed{5}, no: carrying the one, \boxed{6}"
    assert [math_reward(response, answer) for answer in ("6", "5", "5, 6")] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "response",
    ["\\boxed{" * 500, "$" * 5000, "9" * 5000, "\\boxed{\\frac{1}{0}}", "#### 1/0", "2(3)(4)[5]", "\x00\ud800", "="],
)
def test_garbage_is_worth_nothing(response):
    assert math_reward(response, "7") == 0.0


def test_an_answer_line_is_found_in_linear_time():
    assert math_reward("#### 5 " + "ab " * 20_000 + "!", "7") == 0.0


def test_what_cannot_be_decided_in_time_is_worth_nothing(monkeypatch, caplog):
    monkeypatch.setattr(rewards, "_TIME_LIMIT_S", 1)
    assert math_reward(r"\boxed{9^{9^{9^{9}}}}", "7") == 0.0
    assert not caplog.records


def test_other_threads_are_served():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.extend(math_reward(r, a) for r, a, _ in VERDICTS))
    thread.start()
    thread.join()
    assert verdicts == [float(correct) for *_, correct in VERDICTS]


def test_score_judges_each_response_by_its_own_example():
    examples = [Example(0, "7 + 8", "15"), Example(1, "7 + 8", "15"), Example(2, "20 - 6", "14")]
    result = score(["15", "14", "14"], examples, answer_reward)
    assert result.dtype == np.float32
    assert result.tolist() == [1.0, 0.0, 1.0]
    with pytest.raises(InputError, match="row 3 has no answer to judge a response by"):
        score(["15"], [Example(3, "Name a prime.")], answer_reward)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    return write


def test_a_reward_of_the_users_own(user_module):
    name = user_module("length_rewards", "def short(response, example):\n    return example.row_id - len(response)\n")
    reward = load_reward(f"{name}:short")
    assert score(["abc", ""], [Example(5, "x"), Example(6, "y")], reward).tolist() == [2.0, 6.0]


def test_rewards_that_cannot_be_loaded(user_module):
    broken = user_module("broken_rewards", "def f(:\n")
    constant = user_module("constant_rewards", "value = 3\n")
    for spec, message in {
        "math": "is not of the form module:function",
        ":f": "is not of the form module:function",
        "no_such_rewards:f": r"cannot be imported \(ModuleNotFoundError: No module named 'no_such_rewards'\)",
        f"{broken}:f": r"cannot be imported \(SyntaxError",
        f"{constant}:f": "'f' of reward 'constant_rewards:f' does not exist in module 'constant_rewards'",
        f"{constant}:value": "'value' of reward 'constant_rewards:value' is not a function",
    }.items():
        with pytest.raises(InputError, match=message) as error:
            load_reward(spec)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "row 9 is nan; return a finite number"),
        (float("-inf"), "row 9 is -inf; return a finite number"),
        pytest.param(10**400, "return a finite number", id="huge"),
        (np.float64(1e300), "return a finite number"),
        (None, "row 9 is a NoneType; return a number"),
        ("1", "row 9 is a str; return a number"),
        (np.ones(2), "row 9 is a ndarray; return a number"),
    ],
)
def test_rewards_that_are_no_finite_number(value, message):
    with pytest.raises(InputError, match=message):
        score(["x"], [Example(9, "y")], lambda response, example: value)


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.int64(1), np.bool_(True)])
def test_numbers_of_every_kind_are_rewards(value):
    assert score(["x"], [Example(9, "y")], lambda response, example: value).tolist() == [1.0]
