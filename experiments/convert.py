"""Pickled weights of a draft head as safetensors, so that they can be loaded without running code.

Older heads come as `pytorch_model.bin`. PyTorch opens it with `weights_only=True`, which reads tensors and nothing
else; it is needed for this alone: `pip install torch`. Everything but the weights is copied as it is.
"""

import importlib.util
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from experiments.common import Run, RunOptions, run_main
from experiments.expand import random_pair
from experiments.outputs import check_output, markdown_table, open_output, provenance, write_results
from specrl_jax.drafters.eagle3 import Eagle3Drafter
from specrl_jax.drafters.eagle3_folder import save_eagle3
from specrl_jax.drafters.head_files import PICKLED
from specrl_jax.drafters.heads import load_drafter
from specrl_jax.errors import InputError
from specrl_jax.models.folders import replaced_folder
from specrl_jax.models.huggingface import resolve_folder
from specrl_jax.models.weights import WEIGHTS_FILE, write_tensors
from specrl_jax.training.metrics import write_json

SCRIPT = "convert"


@dataclass(frozen=True)
class Config:
    """Options of a conversion."""

    run: Run = RunOptions()
    source: str = ""
    """Folder or hub name of a head with pickled weights."""

    @property
    def mesh(self) -> str:
        """Nothing is computed."""
        return "data=1"


PRESETS: dict[str, Mapping[str, Any]] = {"default": {}, "smoke": {}}


def pickled_files(folder: Path) -> list[Path]:
    """The folder's pickled weights; InputError where there are none."""
    # Beside the weights may lie an optimizer's state.
    files = sorted(folder.glob("pytorch_model*.bin"))
    files = files or [file for pattern in PICKLED for file in sorted(folder.glob(pattern))]
    if not files:
        raise InputError(f"--source {folder} holds no pickled weights; there is nothing to convert")
    return files


def read_pickled(files: list[Path]) -> dict[str, np.ndarray]:
    """All tensors of the files, by name; bfloat16 stays what it is.

    Raises:
        InputError: a file holds something else than tensors, or a tensor stands in two of them.
    """
    import torch

    found: dict[str, np.ndarray] = {}
    for file in files:
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its unpickler met
            raise InputError(
                f"{file} holds more than tensors, or is damaged; ask its author for safetensors"
            ) from error
        if not isinstance(tensors, Mapping):
            raise InputError(f"{file} holds no named tensors; ask its author for safetensors")
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or name in found:
                raise InputError(f"{file}: entry {name} is no tensor, or stands there twice; it cannot be converted")
            tensor = tensor.detach().contiguous()
            if tensor.dtype == torch.bfloat16:
                found[name] = tensor.view(torch.int16).numpy().view(jnp.bfloat16)
                continue
            try:
                found[name] = tensor.numpy()
            except TypeError as error:
                raise InputError(f"{file}: tensor {name} is of type {tensor.dtype}, which is not supported") from error
    return found


def smoke_source(folder: Path) -> Path:
    """A random head with pickled weights, for the smoke preset."""
    import torch

    pair = random_pair(0)
    assert isinstance(pair.drafter, Eagle3Drafter)
    save_eagle3(folder, pair.drafter, pair.draft)
    tensors = load_file(folder / WEIGHTS_FILE)
    torch.save({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, folder / "pytorch_model.bin")
    (folder / WEIGHTS_FILE).unlink()
    return folder


def main(config: Config) -> None:
    """Read, check, write, and load what was written."""
    smoke = config.run.preset == "smoke" and not config.source
    if not config.source and not smoke:
        raise InputError("--source is missing; give the folder or hub name of a head with pickled weights")
    check_output(config.run, SCRIPT, source=config.source or None)
    with tempfile.TemporaryDirectory() as scratch:
        folder = None if smoke else resolve_folder(config.source, "draft head", also=PICKLED)
        files = [] if folder is None else pickled_files(folder)
        if importlib.util.find_spec("torch") is None:
            raise InputError("pickled weights are read with PyTorch, which is not installed; run `pip install torch`")
        if folder is None:
            folder = smoke_source(Path(scratch) / "head")
            files = pickled_files(folder)
        tensors = read_pickled(files)
        out = open_output(config.run, config, SCRIPT)
        with replaced_folder(out / "drafter") as fresh:
            for file in folder.iterdir():
                if file.is_file() and file not in files and file.name != WEIGHTS_FILE:
                    shutil.copy(file, fresh / file.name)
            write_tensors(fresh, tensors, shard_bytes=1 + sum(tensor.nbytes for tensor in tensors.values()))
        row: dict[str, Any] = {"files": " ".join(file.name for file in files), "tensors": len(tensors)}
    row["parameters"] = sum(tensor.size for tensor in tensors.values())
    try:
        load_drafter(out / "drafter")
        row["loads"] = "yes"
    except InputError as error:
        row["loads"] = f"no: {error}"
    source = provenance(config.run.seed)
    write_results(out, [row], "Converted head", source)
    write_json(out / "summary.json", row | source)
    print(markdown_table([{"figure": name, "value": value} for name, value in row.items()]), flush=True)


if __name__ == "__main__":
    run_main(main, Config, PRESETS)
