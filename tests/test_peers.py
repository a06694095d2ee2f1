"""Conversations with peers: a stand-in written here, without any peer's packages."""

import re
import sys
import time
from pathlib import Path

import pytest

from experiments.peers import client
from experiments.peers.client import PEERS, Peer, PeerError, Recipe
from experiments.peers.protocol import generated, one_sentence, seconds_of, spread
from experiments.peers.stepper import Stepper, any_reward, random_prompts
from experiments.peers.tunix_model import IdTokenizer

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[1]
FAKE = """
import os, sys, time
from experiments.peers.protocol import generated, serve

def load(policy, **options):
    print("a banner")
    return {"ok": True, "policy": policy, "options": options, "threads": os.environ["OMP_NUM_THREADS"]}

def generate(prompts, max_new_tokens):
    sys.stdout.write("half a line"); os.write(1, b"from a C library"); os.system("echo from a child")
    return generated(0.5, [prompt[:1] * max_new_tokens for prompt in prompts], rounds=4, accepted=6, drafted=12)

def fail():
    raise ValueError("first line,\\n\\n   second line")

def need():
    import package_of_nobody

def die():
    print("out of memory", file=sys.stderr, flush=True)
    os._exit(3)

def sleep(): time.sleep(60)

def child():
    return {"pid": os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")}

serve({f.__name__: f for f in (load, generate, fail, need, die, sleep, child)})
"""


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """A folder with the environment of a peer `fake`: a bare interpreter, so that the peer's side has no packages."""
    (tmp_path / "fake" / "bin").mkdir(parents=True)
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / "fake" / "bin" / "python").symlink_to(base)
    (tmp_path / "fake_peer.py").write_text(FAKE)
    path = ("PYTHONPATH", f"{tmp_path}:{ROOT}")
    recipe = Recipe("fake_peer", "fake", ("pip install fake==1.0",), ("lib/absent.so",), (path,))
    monkeypatch.setitem(PEERS, "fake", recipe)
    return tmp_path


@pytest.fixture
def peer(environments):
    with Peer("fake", environments, threads=3) as peer:
        yield peer


def is_alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def test_requests_are_answered_whatever_is_printed(peer):
    loaded = peer.request("load", policy="folder", mode="plain")
    assert loaded == {"ok": True, "policy": "folder", "options": {"mode": "plain"}, "threads": "3"}
    for _ in range(2):
        answer = peer.request("generate", prompts=[[7, 8], [9]], max_new_tokens=2)
        assert answer["tokens"] == [[7, 7], [9, 9]]
        assert answer["acceptance_length"] == 2.5
        assert answer["log_probs_computed"] is False


def test_a_failure_is_one_sentence_and_the_peer_lives_on(peer):
    with pytest.raises(PeerError, match=r"^peer fake failed at fail: ValueError: first line, second line$"):
        peer.request("fail")
    with pytest.raises(PeerError, match=r"operation 'dance' is unknown; this peer has load, generate, "):
        peer.request("dance")
    with pytest.raises(PeerError, match="failed at load: TypeError: "):
        peer.request("load")
    assert peer.request("load", policy="folder")["ok"]


def test_a_missing_package_is_named_with_the_remedy(peer):
    with pytest.raises(PeerError, match=r"'package_of_nobody'; make its environment with: .*fake==1\.0"):
        peer.request("need")


def test_a_dead_peer_is_told_with_its_last_words(peer):
    with pytest.raises(PeerError, match=r"^peer fake died during die; its last words: out of memory$"):
        peer.request("die")
    with pytest.raises(PeerError, match="peer fake died during load"):
        peer.request("load", policy="folder")


def test_a_peer_that_does_not_answer_is_ended(environments):
    with Peer("fake", environments, log=environments / "log") as peer:
        peer.request("load", policy="folder")
        start = time.monotonic()
        with pytest.raises(PeerError, match=r"gave no answer to sleep within 0\.2 s; it was ended"):
            peer.request("sleep", timeout_s=0.2)
        assert time.monotonic() - start < 20
    assert "a banner" in (environments / "log").read_text()


def test_the_end_of_the_block_ends_the_peer_and_its_children(environments):
    with Peer("fake", environments) as peer:
        pid = peer.request("child")["pid"]
        assert is_alive(pid)
    assert not is_alive(peer._process.pid)
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_a_missing_environment_is_told_with_the_commands_that_make_it(tmp_path):
    with pytest.raises(PeerError) as caught:
        Peer("vllm", tmp_path / "my envs")
    message = str(caught.value)
    assert "\n" not in message
    folder = f"'{tmp_path}/my envs/vllm'"
    assert message.startswith(f"peer vllm has no environment {tmp_path}/my envs/vllm; ")
    assert f"python3 -m venv {folder} && {folder}/bin/pip install torch==2.13.0" in message
    with pytest.raises(PeerError, match="peer 'sglang' is unknown; choose one of transformers, vllm, "):
        Peer("sglang", tmp_path)


@pytest.mark.parametrize("name", PEERS)
def test_every_recipe_has_its_module_and_stands_in_the_readme(name):
    assert (ROOT / (PEERS[name].module.replace(".", "/") + ".py")).is_file()
    readme = (ROOT / "experiments" / "peers" / "README.md").read_text()
    for command in client.recipe_commands(name, Path("ENVS")).split(" && "):
        assert f"\n{command}\n" in readme
    assert re.search(rf"^\| .*`{name}`", readme, re.M)


def test_one_number_or_one_per_row():
    assert spread(3, 2) == [3, 3]
    assert spread([3, 1], 2) == [3, 1]
    with pytest.raises(ValueError, match="has 1 entries for 2 prompts"):
        spread([3], 2)


def test_answers_without_speculation_have_no_acceptance():
    answer = generated(1.0, [[1]], [[-0.5]])
    assert answer["log_probs_computed"] is True
    assert answer["acceptance_length"] is None
    assert generated(1.0, [[1]], rounds=0, accepted=0, drafted=0)["acceptance_length"] is None
    assert one_sentence(KeyError("x")) == "KeyError: 'x'"


def test_seconds_leave_out_the_first_two_calls():
    pauses = iter([0.05, 0.05, 0.0, 0.0, 0.0])
    answer = seconds_of(lambda: time.sleep(next(pauses)), 3)
    assert len(answer["seconds_all"]) == 3
    assert answer["seconds"] < 0.05


class Loop:
    """A training loop of two steps that then fails."""

    def __init__(self, stepper):
        self.stepper = stepper
        stepper.record(self, "rollout", "rollout", lambda out: stepper.count(out))
        stepper.record(self, "prepare", "prepare")

    def rollout(self):
        time.sleep(0.01)
        return [[1, 2], [3]]

    def prepare(self):
        return self.rollout()

    def run(self):
        for _ in range(2):
            self.stepper.wait()
            self.prepare()
        self.stepper.wait()
        raise OSError("disk full")


def test_a_training_loop_goes_step_by_step():
    stepper = Stepper()
    stepper.start(Loop(stepper).run)
    for _ in range(2):
        answer = stepper.answer()
        assert answer["new_tokens"] == 3
        assert answer["rollout_s"] >= 0.01
        assert answer["reward_s"] == 0.0
        assert 0.0 <= answer["logprob_s"] < answer["seconds"]
        parts = sum(answer[name] for name in ("rollout_s", "logprob_s", "reward_s", "update_s"))
        assert parts == pytest.approx(answer["seconds"])
    with pytest.raises(OSError, match="disk full"):
        stepper.answer()


def test_a_loop_that_ends_or_fails_at_once_is_told():
    with pytest.raises(RuntimeError, match="has ended"):
        Stepper().start(lambda: None)
    with pytest.raises(ZeroDivisionError):
        Stepper().start(lambda: 1 // 0)


def test_texts_of_ids_come_back():
    tokenizer = IdTokenizer()
    assert tokenizer.encode(tokenizer.decode([5, 0, 16383])) == [5, 0, 16383]
    assert not tokenizer.bos_id()
    assert min(tokenizer.pad_id(), tokenizer.eos_id()) < 0
    prompts = random_prompts(6, 100)
    assert [len(tokenizer.encode(text)) for text in prompts] == [6] * 4
    assert random_prompts(6, 100) == prompts != random_prompts(6, 100, seed=1)
    assert any_reward(["1 2", "12345678901"]) == [3.0, 1.0]
