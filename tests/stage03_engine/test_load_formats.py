"""`--load-format`: however weights are stored, the tokens are the same; what is no checkpoint is one line."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.distributed.ranks import Ranks
from stage03_engine.core.features.load_formats import pt
from stage03_engine.core.features.load_formats.save_sharded_state import main, save_sharded_state
from stage03_engine.core.features.load_formats.sharded_state import save_rank
from stage03_engine.core.models.loader import checkpoint_tensors, get_model
from stage03_engine.errors import ConfigError, ModelNotFoundError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER, WeightFormat
from stage03_engine.plugins import keys
from stage03_engine.sampling_params import SamplingParams

BUNDLED = BUNDLED_FOLDER / "gpt2-tiny"
SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 70}
PROMPTS = ["ROMEO:", "To be, or not"]


def tensors() -> dict[str, torch.Tensor]:
    return load_file(BUNDLED / "model.safetensors")


def folder_with(path: Path, **files: Any) -> Path:
    """gpt2-tiny's files but its weights, and `files`, saved as torch does: name with __ for a dot."""
    path.mkdir(exist_ok=True)
    for file in BUNDLED.glob("*.json"):
        shutil.copyfile(file, path / file.name)
    for name, content in files.items():
        torch.save(content, path / name.replace("__", "."))
    return path


def load(folder: Path, **settings: Any) -> torch.nn.Module:
    config = EngineArgs.from_kwargs(model=str(folder), **settings)
    return get_model(config, torch.float32, torch.device("cpu"))


def same(model: torch.nn.Module) -> bool:
    expected = dict(load(BUNDLED).named_parameters())
    found = dict(model.named_parameters())
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def answers(model: str, **more: Any) -> list[list[int]]:
    with LLM(model, **SETTINGS, **more) as llm:
        return [
            each.outputs[0].token_ids for each in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
        ]


# Pickled tensors


@pytest.mark.parametrize("load_format", ["auto", "pt"])
@pytest.mark.parametrize("name", ["pytorch_model__bin", "model__pt"])
def test_pickled_weights_are_the_same_weights(tmp_path: Path, name: str, load_format: str) -> None:
    folder = folder_with(tmp_path, **{name: tensors()}, training_args__bin={"lr": 1.0}, optimizer__pt={})
    assert same(load(folder, load_format=load_format))
    assert EngineArgs.from_kwargs(model=str(folder)).model_config.load_format == "pt"


def test_the_format_before_zip_files_and_several_files(tmp_path: Path) -> None:
    everything = sorted(tensors().items())
    folder = folder_with(tmp_path, b__bin=dict(everything[9:]))
    torch.save(dict(everything[:9]), folder / "a.bin", _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(folder / "a.bin") and same(load(folder))


def test_safetensors_files_go_before_pickled_ones(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, pytorch_model__bin={"no": "weights"})
    shutil.copyfile(BUNDLED / "model.safetensors", folder / "model.safetensors")
    assert same(load(folder)) and same(load(folder, load_format="safetensors"))
    with pytest.raises(ConfigError, match="'no' is no dense tensor"):
        load(folder, load_format="pt")


class Harm:
    """What a stranger's pickle may hold."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, ("harm", "w")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "runs code": (lambda file: torch.save({"w": Harm()}, file), "reading it might run code"),
    "runs code, not zipped": (lambda file: file.write_bytes(pickle.dumps(Harm())), "reading it might run code"),
    "a list": (lambda file: torch.save([torch.ones(1)], file), "holds a list"),
    "a number": (lambda file: torch.save({"wte.weight": 1.0}, file), "'wte.weight' is no dense tensor"),
    "nested": (lambda file: torch.save({"state_dict": {}}, file), "'state_dict' is no dense tensor"),
    "sparse": (lambda file: torch.save({"wte.weight": torch.eye(2).to_sparse()}, file), "is no dense tensor"),
    "empty": (lambda file: file.write_bytes(b""), "cannot read the weights|reading it might run code"),
    "half of it": (lambda file: file.write_bytes(file.read_bytes()[:-5000]), "cannot read the weights|might run code"),
    "a missing tensor": (lambda file: torch.save(dict(list(tensors().items())[1:]), file), "lacks 1 tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_checkpoint_is_refused_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = folder_with(tmp_path / "model", pytorch_model__bin=tensors())
    write, reason = BAD[case]
    write(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=reason) as refused:
        load(folder)
    assert "\n" not in str(refused.value) and not (tmp_path / "harm").exists()


def zip_with(file: Path, pickled: bytes, name: str = "data.pkl") -> None:
    """What torch.save writes, with this pickle instead of its own."""
    torch.save(tensors(), file)
    with zipfile.ZipFile(file) as before:
        parts = {each.filename: before.read(each) for each in before.infolist()}
    with zipfile.ZipFile(file, "w") as after:
        for at, content in parts.items():
            folder, _, end = at.rpartition("/")
            after.writestr(f"{folder}/{name}" if end == "data.pkl" else at, pickled if end == "data.pkl" else content)


LONG = {"marks": b"(", "dictionaries": b"}", "tuples": b"(t", "notes": b"q\x00"}


@pytest.mark.parametrize("form", ["zip", "zip, in capitals", "before zip", "before zip, in its third"])
@pytest.mark.parametrize("what", LONG)
def test_a_pickle_that_is_longer_than_any_models_is_not_begun(
    what: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, code = folder_with(tmp_path), b"\x80\x02" + LONG[what] * 5_000_000 + b"."
    file = folder / "pytorch_model.bin"
    if form.startswith("zip"):
        zip_with(file, code, "DATA.PKL" if "capitals" in form else "data.pkl")
    else:
        file.write_bytes(pickle.dumps(1, 2) * (2 if "third" in form else 0) + code)
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(
        ConfigError, match=r"pytorch_model\.bin pickles more than names and sizes of a model"
    ) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


def test_the_pickles_of_all_files_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = sorted(tensors().items())
    folder = folder_with(tmp_path, a__bin=dict(everything[9:]), b__bin=dict(everything[:9]))
    torch.save(dict(everything[9:]), folder / "a.bin", _use_new_zipfile_serialization=False)
    sizes = [pt.pickled_bytes(folder / name, 10**6) for name in ("a.bin", "b.bin")]
    assert all(80 * n < size < 500 + 200 * n for size, n in zip(sizes, (len(everything) - 9, 9), strict=True)), sizes
    monkeypatch.setattr(pt, "LAYER_TENSORS", 0)
    for most, fits in ((sum(sizes), True), (sum(sizes) - 1, False)):
        monkeypatch.setattr(pt, "TENSOR_BYTES", 1)
        monkeypatch.setattr(pt, "TENSORS", most)
        if fits:
            assert same(load(folder))
            continue
        with pytest.raises(ConfigError, match=rf"b\.bin pickles more .* {most} bytes of them"):
            load(folder)


def test_an_index_of_pickled_files_is_followed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, a__bin=tensors(), old__bin={"no": "weights"})
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"wte.weight": "a.bin"}}')
    assert same(load(folder))
    (folder / "a.bin").unlink()
    with pytest.raises(ModelNotFoundError, match=r"weights are missing .*a\.bin"):
        load(folder)


@pytest.mark.parametrize("name", sorted(keys("weights")))
def test_a_format_without_its_files_is_refused(name: str) -> None:
    form: WeightFormat = keys("weights")[name].load()
    assert form.tensors.partition(":")[0].startswith("stage03_engine.core.features.")
    if form.needs_files:
        with pytest.raises(ModelNotFoundError, match=f"holds no files of --load-format {name}"):
            EngineArgs.from_kwargs(model="gpt2-tiny", load_format=name)


# Each worker's slices


@pytest.mark.slow(keep="tensor")
@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=lambda sizes: next(iter(sizes))
)
def test_slices_serve_the_same_tokens(sizes: dict[str, int], tmp_path: Path) -> None:
    config = EngineArgs.from_kwargs(model="gpt2-tiny", **sizes)
    assert save_sharded_state(config, tmp_path / "out") == 2
    assert not (tmp_path / "out/model.safetensors").exists()
    assert answers(str(tmp_path / "out"), load_format="sharded_state", **sizes) == answers("gpt2-tiny")


def test_one_worker_alone(tmp_path: Path) -> None:
    assert main(["--model", "gpt2-tiny", "--out", str(tmp_path / "out")]) == 0
    assert same(load(tmp_path / "out", load_format="sharded_state"))


def test_slices_of_other_workers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["--model", "gpt2-tiny", "-tp", "2", "--out", str(out)]) == 0
    with pytest.raises(ConfigError, match="was made for tensor_parallel_size 2, not 1"):
        load(out, load_format="sharded_state")
    swapped = tmp_path / "swapped"
    save_sharded_state(EngineArgs.from_kwargs(model="gpt2-tiny"), swapped)
    shutil.copyfile(out / "model-rank-1-part-0.safetensors", swapped / "model-rank-0-part-0.safetensors")
    with pytest.raises(ConfigError, match="was made for rank 1, not 0"):
        load(swapped, load_format="sharded_state")
    (out / "model-rank-0-part-0.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no slices for worker 0 of 1"):
        load(out, load_format="sharded_state")
    shutil.copyfile(BUNDLED / "model.safetensors", out / "model-rank-0-part-0.safetensors")
    with pytest.raises(ConfigError, match="was made for rank None, not 0"):
        load(out, load_format="sharded_state")
    (out / "model-rank-0-part-0.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match="cannot read the weights in"):
        load(out, load_format="sharded_state")
    capsys.readouterr()
    for words in (
        ["--model", "gpt2-tiny", "--out", str(out)],
        ["--model", "gpt2", "--load-format", "dummy", "--out", str(tmp_path / "new")],
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("stages: error: ") and error.count("\n") == 1, error


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 400))
def test_parts_hold_every_tensor_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], part_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    given = {f"t{number}": torch.full((size,), float(number)) for number, size in enumerate(sizes)}
    count = save_rank(folder, Ranks(1, 2), given.items(), part_bytes)
    found: dict[str, torch.Tensor] = {}
    for part in range(count):
        with safe_open(folder / f"model-rank-1-part-{part}.safetensors", framework="pt") as stored:
            names = list(stored.keys())
            assert not found.keys() & set(names)
            found |= {name: stored.get_tensor(name) for name in names}
            assert len(names) == 1 or sum(found[name].nbytes for name in names) <= part_bytes
    assert len(list(folder.iterdir())) == count and found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given)


def test_the_slices_are_cut_from_the_checkpoint(tmp_path: Path) -> None:
    """Together they hold each matrix once."""
    save_sharded_state(EngineArgs.from_kwargs(model="gpt2-tiny", tensor_parallel_size=2), tmp_path)
    whole = dict(checkpoint_tensors(BUNDLED))
    ranks = [load_file(tmp_path / f"model-rank-{rank}-part-0.safetensors") for rank in range(2)]
    name = "h.0.mlp.c_fc.weight"
    assert torch.equal(torch.cat([each[name] for each in ranks], 1), whole[name])
    assert all(torch.equal(each["ln_f.weight"], whole["ln_f.weight"]) for each in ranks)


def test_a_draft_is_read_as_it_is_stored(tmp_path: Path) -> None:
    """Whatever the target is stored as."""
    draft = {"model": "gpt2-tiny-draft", "num_speculative_tokens": 3}
    expected = answers("gpt2-tiny")
    assert answers(str(folder_with(tmp_path / "pt", w__bin=tensors())), speculative_config=draft) == expected
    save_sharded_state(EngineArgs.from_kwargs(model="gpt2-tiny"), tmp_path / "cut")
    assert answers(str(tmp_path / "cut"), load_format="sharded_state", speculative_config=draft) == expected


def test_what_is_quantized_is_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a target nor a draft may be: slices of codes are none of weights."""
    folder = folder_with(tmp_path / "model")
    shutil.copyfile(BUNDLED / "model.safetensors", folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["--model", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "a quantized checkpoint is not cut" in capsys.readouterr().err
    save_sharded_state(EngineArgs.from_kwargs(model="gpt2-tiny"), tmp_path / "slices")
    shutil.copyfile(folder / "config.json", tmp_path / "slices/config.json")
    with pytest.raises(ConfigError, match="sharded_state has no slices of weights in fp8"):
        EngineArgs.from_kwargs(model=str(tmp_path / "slices"), load_format="sharded_state")
    with pytest.raises(ConfigError, match="is quantized, and a draft has ordinary weights"):
        EngineArgs.from_kwargs(
            model="gpt2-tiny", speculative_config={"model": str(folder), "num_speculative_tokens": 2}
        )
