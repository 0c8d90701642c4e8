"""Model folders that were made to do harm, or by mistake: refused in one line before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import StagesError
from stage03_engine.model_path import BUNDLED_FOLDER

CONFIGS: dict[str, Any] = {
    "a billion layers": ({"n_layer": 10**9}, "1000000000 layers"),
    "layers by the kilo": ({"n_layer": 1025}, "1025 layers"),
    "no number": ({"n_embd": "many"}, "n_embd"),
    "a number that is none": ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon"),
    "too large for any index": ({"vocab_size": 2**31}, "vocab_size"),
}
INDEXES = ["[]", "5", "{}", '{"weight_map": 5}', '{"weight_map": ["a"]}', "[" * 100_000, '{"weight_map": {"a": {}}}']


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED_FOLDER / "gpt2-tiny", tmp_path / "model", copy_function=shutil.copy))


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_that_cannot_be(folder: Path, name: str) -> None:
    changes, says = CONFIGS[name]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(StagesError, match=says):
        EngineArgs.from_kwargs(model=str(folder))


@pytest.mark.parametrize("text", INDEXES, ids=lambda text: text[:30])
def test_an_index_of_weights_that_is_none(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(StagesError, match="index.json|weights are missing"):
        EngineArgs.from_kwargs(model=str(folder))
