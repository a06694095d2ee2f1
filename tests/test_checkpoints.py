"""Checkpoints: bit-exact, bounded in number, safe against a kill, and clear about what does not fit."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from specrl_jax.errors import InputError
from specrl_jax.parallel.mesh import DATA, MeshConfig, make_mesh
from specrl_jax.training.checkpoints import CheckpointWriter, latest_step, load_meta, restore_checkpoint

pytestmark = pytest.mark.ci
ROOT = Path(__file__).parents[1]


@struct.dataclass
class Counters:
    key: jax.Array
    problem: jax.Array


def _state():
    bits = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    params = {
        # Every pattern of bits has to survive, NaNs and subnormal numbers among them.
        "fp32": jnp.asarray(bits.view(np.float32)),
        "bf16": (jnp.asarray(bits.astype(np.uint16)).view(jnp.bfloat16), None),
    }
    weights = {"w": jnp.linspace(0.0, 1.0, 12).reshape(3, 4)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(weights)
    return params, optimizer, Counters(key=jnp.asarray([7, 2**31 + 5], jnp.uint32), problem=jnp.int32(41))


def _assert_same_bits(restored, state):
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _save(folder, step, state, meta, score=None):
    with CheckpointWriter(folder) as writer:
        writer.save(step, state, meta, score)


def _abstract(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


@pytest.mark.parametrize("as_abstract", [True, False])
def test_state_comes_back_bit_for_bit(tmp_path, as_abstract):
    state, folder = _state(), tmp_path / "checkpoints"
    _save(folder, 5, state, {"step": 5, "fingerprint": "ab"})
    restored, meta = restore_checkpoint(folder, _abstract(state) if as_abstract else state)
    _assert_same_bits(restored, state)
    assert meta == load_meta(folder) == {"step": 5, "fingerprint": "ab"}
    assert not any(leaf.committed for leaf in jax.tree.leaves(restored))


def test_shardings_are_those_asked_for(tmp_path):
    rows = NamedSharding(make_mesh(MeshConfig(data=8)), PartitionSpec(DATA))
    state = {"rows": jax.device_put(jnp.arange(16.0), rows), "host": np.arange(3)}
    _save(tmp_path, 0, state, {})
    restored, _ = restore_checkpoint(tmp_path, state)
    assert restored["rows"].sharding == rows
    assert isinstance(restored["host"], np.ndarray)
    _assert_same_bits(restored, state)
    # A run on another mesh reads the same checkpoint.
    single, _ = restore_checkpoint(tmp_path, {"rows": jnp.zeros(16), "host": np.zeros(3, int)})
    assert len(single["rows"].devices()) == 1
    _assert_same_bits(single, state)


def test_the_last_ones_are_kept(tmp_path):
    folder = tmp_path / "checkpoints"
    assert latest_step(folder) is None
    for step in (0, 5, 10, 15):
        _save(folder, step, {"step": jnp.int32(step)}, {"step": step})
    assert sorted(int(path.name) for path in folder.iterdir()) == [10, 15]
    assert latest_step(folder) == 15
    # A step that is saved already stays as it is.
    _save(folder, 15, {"step": jnp.int32(-1)}, {})
    assert restore_checkpoint(folder, {"step": jnp.int32(0)})[0]["step"] == 15
    with pytest.raises(ValueError, match="holds step 15"):
        _save(folder, 12, {"step": jnp.int32(12)}, {})


def test_the_best_one_is_kept_besides(tmp_path):
    state = {"w": jnp.zeros(3), "none": jnp.zeros(0)}
    with CheckpointWriter(tmp_path, keep=1) as writer:
        for step, score in ((1, 0.2), (2, 0.7), (3, None), (4, 0.5), (5, None)):
            writer.save(step, state, {}, score)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [2, 5]


def test_a_state_may_be_overwritten_while_it_is_saved(tmp_path):
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    state, expected = double(jnp.ones(3_000_000)), np.full(3_000_000, 2.0, np.float32)
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, {"w": state}, {})
        for _ in range(5):
            state = double(state)
    np.testing.assert_array_equal(restore_checkpoint(tmp_path, {"w": state})[0]["w"], expected)


_KILLED_SAVE = """
import os, signal, sys, threading
from pathlib import Path
import numpy as np
from specrl_jax.training.checkpoints import CheckpointWriter, restore_checkpoint

folder, state = Path(sys.argv[1]), {"weights": np.random.default_rng(0).normal(size=5_000_000)}
with CheckpointWriter(folder) as writer:
    writer.save(1, state, {"step": 1})
restore_checkpoint(folder, state)

def kill_when_it_has_begun():
    while not any(path.name != "1" for path in folder.iterdir()):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill_when_it_has_begun).start()
with CheckpointWriter(folder) as writer:
    writer.save(2, {"weights": 2 * state["weights"]}, {"step": 2})
"""


def test_a_kill_while_saving_leaves_the_checkpoint_before_and_no_noise(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _KILLED_SAVE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-9, "", "")
    assert any(path.name != "1" for path in tmp_path.iterdir()), "the save of step 2 had not begun"
    assert latest_step(tmp_path) == 1
    restored, meta = restore_checkpoint(tmp_path, {"weights": np.zeros(5_000_000)})
    assert meta == {"step": 1}
    np.testing.assert_array_equal(restored["weights"], np.random.default_rng(0).normal(size=5_000_000))
    _save(tmp_path, 3, restored, {"step": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


def test_bad_checkpoints_are_named_in_one_sentence(tmp_path):
    state = {"params": {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}}
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match="holds no complete checkpoint; start a new run"):
            restore_checkpoint(missing, state)
    _save(tmp_path, 3, state, {})
    w, b = state["params"]["w"], state["params"]["b"]
    cases = [
        ({"w": jnp.zeros((2, 4)), "b": b}, r"3: array params/w is float32\[2, 3\] but this run needs float32\[2, 4\]"),
        ({"w": w, "b": b.astype(jnp.bfloat16)}, r"array params/b is float32\[3\] but this run needs bfloat16\[3\]"),
        ({"w": w, "b": b, "c": b}, "array params/c is missing; resume with the configuration"),
        ({"w": w}, "array params/b is not part of this run's state; resume with"),
    ]
    for like, sentence in cases:
        with pytest.raises(InputError, match=sentence):
            restore_checkpoint(tmp_path, {"params": like})


@pytest.mark.parametrize("damage", ["state/_METADATA", "meta/metadata", "state/manifest.ocdbt", "data"])
def test_a_damaged_checkpoint_is_named_in_one_sentence(tmp_path, damage):
    state = {"w": jnp.asarray(np.random.default_rng(0).normal(size=5000), jnp.float32)}
    for step in (1, 2):
        _save(tmp_path, step, state, {})
    files = (path for path in (tmp_path / "2").rglob("*") if path.is_file())
    path = max(files, key=lambda p: p.stat().st_size) if damage == "data" else tmp_path / "2" / damage
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=r"checkpoint .*2 is damaged \(.+\); delete that folder"):
        restore_checkpoint(tmp_path, state)
