"""Model folders that were made to do harm, or by mistake: refused in one line before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.models.layers import check_finite
from stage03_engine.core.models.loader import get_model
from stage03_engine.errors import ConfigError, StagesError
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


def with_index(folder: Path, *names: str) -> None:
    index = {"weight_map": {str(number): name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../other/a.safetensors", "/etc/passwd", "linked", "sub/../../other/a.safetensors", "a\0b"]
)
def test_a_shard_outside_of_the_folder(folder: Path, name: str) -> None:
    other = folder.parent / "other" / "a.safetensors"
    other.parent.mkdir()
    shutil.copy(folder / "model.safetensors", other)
    (folder / "linked").symlink_to(other)
    (folder / "sub").mkdir()
    with_index(folder, "model.safetensors", name)
    with pytest.raises(StagesError, match="lies outside the model's folder") as error:
        EngineArgs.from_kwargs(model=str(folder))
    assert "\n" not in str(error.value)


def test_shards_in_the_folder_and_links_of_the_hub_cache(tmp_path: Path) -> None:
    """The cache keeps the files of a model as ../../blobs/<hash>, and links to them."""
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (BUNDLED_FOLDER / "gpt2-tiny").iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (snapshot / "near").symlink_to("model.safetensors")
    with_index(snapshot, "model.safetensors", "near")
    assert EngineArgs.from_kwargs(model=str(snapshot)).model_config.model_path == str(snapshot)
    (tmp_path / "models--a" / "secret").write_bytes(b"")
    with_index(snapshot, "../../secret")
    with pytest.raises(StagesError, match="outside"):
        EngineArgs.from_kwargs(model=str(snapshot))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_that_are_not_numbers_are_named(number: float, dtype: torch.dtype) -> None:
    weights = torch.ones(3, 1000).to(dtype)
    weights[1, 7] = number
    with pytest.raises(ConfigError, match=r"^h\.0\.w holds NaN or infinity: the weights are broken$"):
        check_finite("h.0.w", weights)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32])
def test_large_weights_are_no_infinity(dtype: torch.dtype) -> None:
    """Though their sum is one."""
    check_finite("w", torch.full((4, 4), torch.finfo(dtype).max, dtype=torch.float64).to(dtype))


def test_an_engine_with_broken_weights_says_which(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[3]
    weights[name].view(-1)[5] = float("nan")
    save_file(weights, folder / "model.safetensors")
    device = torch.device("cpu")
    with pytest.raises(ConfigError, match=f"^{name} holds NaN"):
        get_model(EngineArgs.from_kwargs(model=str(folder)), torch.float32, device)
    get_model(EngineArgs.from_kwargs(model=str(folder), load_format="dummy"), torch.float32, device)
