"""gpt2-tiny with its first layers only: the same paths through the engine in a part of the time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from stage03_engine.model_path import BUNDLED_FOLDER


def first_layers(folder: Path, num_layers: int) -> str:
    """Write the model into `folder`, which must not exist. Returns its path, as `LLM` takes it."""
    shutil.copytree(BUNDLED_FOLDER / "gpt2-tiny", folder, copy_function=shutil.copy)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": num_layers}))
    dropped = tuple(f"h.{layer}." for layer in range(num_layers, config["n_layer"]))
    tensors = load_file(folder / "model.safetensors")
    kept = {
        name: tensor for name, tensor in tensors.items() if not name.removeprefix("transformer.").startswith(dropped)
    }
    save_file(kept, folder / "model.safetensors")
    return str(folder)
