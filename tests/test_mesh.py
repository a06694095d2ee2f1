"""The mesh as it is asked for on the command line, and the warning about an idle accelerator."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from specrl_jax.errors import InputError
from specrl_jax.parallel.mesh import MeshConfig, make_mesh, parse_mesh

pytestmark = pytest.mark.ci


def test_axes_are_read_in_any_order_and_default_to_one():
    assert parse_mesh("data=8,fsdp=2,tensor=4") == MeshConfig(data=8, fsdp=2, tensor=4)
    assert parse_mesh(" tensor=2 , data=3") == MeshConfig(data=3, tensor=2)
    assert parse_mesh("") == MeshConfig()
    assert parse_mesh(str(MeshConfig(data=5, tensor=2))) == MeshConfig(data=5, tensor=2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data=2,model=2", 'unknown axis "model"; write data=N,fsdp=N,tensor=N'),
        ("8", 'unknown axis "8"'),
        ("data=two", 'size "two" of axis data is not a whole number; write data=1'),
        ("data=-2", 'size "-2" of axis data is not a whole number'),
        ("data", 'size "" of axis data is not a whole number'),
        ("data=2,data=4", "axis data is given twice"),
        ("fsdp=0", "axis fsdp is 0; it must be at least 1"),
    ],
)
def test_malformed_meshes_are_refused(text, sentence):
    with pytest.raises(InputError) as error:
        parse_mesh(text)
    assert sentence in str(error.value)


def test_a_mesh_takes_the_first_devices():
    built = make_mesh(MeshConfig(data=2, tensor=2))
    assert built.axis_names == ("data", "fsdp", "tensor")
    assert dict(built.shape) == {"data": 2, "fsdp": 1, "tensor": 2}
    assert built.devices.ravel().tolist() == jax.devices()[:4]


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(InputError, match=r"takes 16 devices but jax sees 8 \(cpu\).*JAX_NUM_CPU_DEVICES=16"):
        make_mesh(MeshConfig(data=4, fsdp=4))


def test_a_run_over_several_hosts_uses_every_device(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="takes 4 of 8 devices"):
        make_mesh(MeshConfig(data=4))
    assert make_mesh(MeshConfig(data=8)).size == 8


_ON_A_MACHINE_WITH_A_GPU = """
import jax._src.hardware_utils as hardware
hardware.has_visible_nvidia_gpu = lambda: True
from experiments.common import configure_jax
configure_jax()
"""


def _stderr(tmp_path, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_MACHINE_WITH_A_GPU],
        cwd=Path(__file__).parents[1],
        env={**kept, "XDG_CACHE_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


@pytest.mark.skipif(any(map(find_spec, ("jax_plugins", "libtpu"))), reason="jax can use an accelerator here")
def test_an_idle_accelerator_is_reported_in_one_sentence(tmp_path):
    warning = _stderr(tmp_path)
    assert warning.startswith("warning: An NVIDIA GPU may be present on this machine")
    assert 'run pip install ".[cuda]"' in warning
    assert warning.count("\n") == 1
    assert _stderr(tmp_path, JAX_PLATFORMS="cpu") == ""
