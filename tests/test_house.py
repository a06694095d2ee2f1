"""Rules of the source tree that no linter knows: floors, sizes, declared packages, commands that exist."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from readme_tables import with_tables

pytestmark = pytest.mark.ci
ROOT = Path(__file__).parents[1]

# Imports go to a lower floor only; packages of one floor do not know each other.
FLOORS = {
    "specrl_jax.errors": -2,
    "specrl_jax.models": 0,
    "specrl_jax.data": 0,
    "specrl_jax.parallel": -1,
    "specrl_jax.kernels": -1,
    "specrl_jax.drafters": 1,
    "specrl_jax.rollout": 2,
    "specrl_jax.rl": 3,
    "specrl_jax.training": 4,
    "experiments": 5,
}
MAX_LINES = 500
# Imported only where the user asks for them, and installed by an extra.
OPTIONAL_PACKAGES = {"tensorboardX", "torch", "wandb"}
# Imported by peers, which run in environments of their own (experiments/peers/README.md).
PEER_PACKAGES = {"torch", "trl", "tunix", "vllm"}
TEXT = {".cfg", ".ipynb", ".json", ".jsonl", ".log", ".md", ".py", ".toml", ".txt", ".yaml", ".yml", ".sh"}
# Larger than any table, fixture or picture that belongs in a repository.
MAX_BYTES = 1_000_000


def _files(*folders):
    skipped = {"__pycache__"}
    for folder in folders:
        for place, names, files in os.walk(ROOT / folder):
            names[:] = [name for name in names if not name.startswith(".") and name not in skipped]
            yield from (Path(place) / name for name in sorted(files))


SOURCES = [path for path in _files("specrl_jax", "experiments") if path.suffix == ".py"]
MODULES = [*SOURCES, *(path for path in _files("tests") if path.suffix == ".py")]
SCRIPTS = [path for path in SOURCES if path.parent.name == "experiments" and "\n    run_main(" in path.read_text()]


def _name(path):
    return path.relative_to(ROOT).as_posix()


def _imports(path):
    """Full dotted names of everything that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno} imports by a relative name"
            # `from specrl_jax import models` imports specrl_jax.models.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _package(module):
    return next((package for package in FLOORS if f"{module}.".startswith(f"{package}.")), None)


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_imports_go_down_only(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    if module == "specrl_jax":
        return
    own = _package(module)
    assert own is not None, f"{module} belongs to no floor"
    for name in _imports(path):
        other = _package(name)
        if name.split(".")[0] in ("specrl_jax", "experiments"):
            assert other is not None, f"{_name(path)} imports {name}, which belongs to no floor"
        if other not in (None, own):
            assert FLOORS[other] < FLOORS[own], f"{_name(path)} (floor {FLOORS[own]}) imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_modules_are_short_and_say_what_they_hold(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), "a module begins with a docstring"


def test_every_imported_package_is_declared():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    declared = {_canonical(re.match(r"[\w.-]+", line)[0]) for line in lines if line and line[0] != "#"}
    distributions = importlib.metadata.packages_distributions()
    for path in SOURCES:
        known = sys.stdlib_module_names | {"specrl_jax", "experiments"} | OPTIONAL_PACKAGES
        if path.parent.name == "peers":
            known |= PEER_PACKAGES
        for name in {name.split(".")[0] for name in _imports(path)} - known:
            provided = {_canonical(distribution) for distribution in distributions.get(name, [])}
            assert provided & declared, f"{_name(path)} imports {name}, which requirements.txt does not have"


def _canonical(distribution):
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_extras_and_licence_are_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) >= {"cuda", "tpu", "tensorboard", "wandb", "convert", "dev"}
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_no_pickles_and_no_binary_junk():
    for path in _files("."):
        place = path.relative_to(ROOT)
        if place.parts[0] in ("build", "runs") or any(part.endswith(".egg-info") for part in place.parts):
            continue
        assert path.stat().st_size < MAX_BYTES, f"{place} is large"
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                assert all(arrays[name].dtype != object for name in arrays)
        elif path.suffix in TEXT or not path.suffix:
            path.read_text(encoding="utf-8")
        else:
            assert path.suffix in (".png", ".safetensors", ".jinja"), f"{place} is of a kind that does not belong here"


def test_documented_commands_exist():
    documents = [*ROOT.glob("*.md"), *(ROOT / "specrl_jax").glob("*.md"), *SOURCES]
    commands = {
        name for path in documents for name in re.findall(r"-m experiments\.([a-z_0-9.]*[a-z_0-9])", path.read_text())
    }
    assert "train_grpo" in commands
    for name in commands:
        file = f"experiments/{name.replace('.', '/')}.py"
        assert (ROOT / file).is_file(), f"{file} is documented but missing"


def test_the_readme_has_its_two_commands_in_one_line_each():
    sections = re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.M)[1:]
    blocks = {text.split("\n", 1)[0]: re.findall(r"```bash\n(.*?)\n```", text, re.S) for text in sections}
    ends = {"Run": "python -m experiments.train_grpo --preset demo --out", "Test": "pytest -n 2 --dist loadfile -m ci"}
    for heading, last in ends.items():
        (command,) = blocks[heading]
        assert "\n" not in command, f"the command under {heading} is one line"
        assert command.startswith("python3 -m venv .venv && ")
        assert last in command


def test_the_tables_of_the_readme_equal_the_results():
    text = (ROOT / "README.md").read_text()
    assert with_tables(text) == text, "run PYTHONPATH=. python tests/readme_tables.py"
    # The check sees a changed figure.
    changed = re.sub(r"(<!-- table: .*?\d\.\d)(\d)", lambda m: m[1] + str(9 - int(m[2])), text, flags=re.S)
    assert with_tables(changed) == text != changed


def test_ci_runs_the_command_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    extraction = re.search(r"^command=(\$\(awk .*\))$", script.read_text(), re.M)[1]
    found = subprocess.run(["bash", "-c", f'printf %s "{extraction}"'], cwd=ROOT, capture_output=True, text=True)
    assert f"## Test\n\n```bash\n{found.stdout}\n```" in (ROOT / "README.md").read_text()
    for name in re.findall(r"tests/\w+\.py", script.read_text()):
        assert (ROOT / name).is_file(), f"{name} is part of the subset of .ci/run but missing"


HELP = """
import contextlib, io, runpy, sys
for script in sys.argv[1:]:
    sys.argv, said = [script, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_module(f"experiments.{script}", run_name="__main__")
    except SystemExit as end:
        lacking = [option for option in ("--preset", "smoke", "--seed", "--out") if option not in said.getvalue()]
        print(script, end.code, *lacking)
"""


def test_scripts_explain_themselves_without_a_device():
    scripts = [path.stem for path in SCRIPTS]
    done = subprocess.run(
        [sys.executable, "-c", HELP, *scripts],
        cwd=ROOT,
        # Starting any device fails.
        env={**os.environ, "JAX_PLATFORMS": "none"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{script} 0" for script in scripts]
