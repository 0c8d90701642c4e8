"""Models that an installed package registers: `ModelRegistry.register_model`, from a function that an entry point names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE
from server_under_test import ServerProcess

from stage03_engine import plugins
from stage03_engine.core.models.gpt2 import GPT2LMHeadModel
from stage03_engine.errors import ConfigError
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.own_models import registry
from stage03_engine.own_models.registry import ModelRegistry
from stage03_engine.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent.parent
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32"}
MODEL = """
from stage03_engine.core.models.gpt2 import GPT2LMHeadModel

class Gloam(GPT2LMHeadModel):
    "Every token is the one after GPT-2's."
    def compute_logits(self, hidden_states):
        return super().compute_logits(hidden_states).roll(1, dims=-1)

class Raises(GPT2LMHeadModel):
    def __init__(self, shape, backend):
        raise RuntimeError("no layers")
"""
PLUGIN = """
def register():
    from stage03_engine.own_models.registry import ModelRegistry
    if "GloamForCausalLM" not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model("GloamForCausalLM", "gloam.model:Gloam")

def for_vllm_alone():
    from a_package_that_is_not_here import ModelRegistry

def wrongly():
    from stage03_engine.own_models.registry import ModelRegistry
    ModelRegistry.register_model("GPT2LMHeadModel", "gloam.model:Gloam")

def registering(model, read_config=None):
    def register():
        from stage03_engine.own_models.registry import ModelRegistry
        more = () if read_config is None else (read_config,)
        ModelRegistry.register_model("GloamForCausalLM", model, *more)
    return register

def reads_badly(config, architecture):
    return config.values["no_such_key"]

nowhere = registering("gloam.nowhere:Gloam")
no_class = registering("gloam.model:Nobody")
no_model = registering("builtins:dict")
raises = registering("gloam.model:Raises")
bad_reader = registering("gloam.model:Gloam", reads_badly)
no_shape = registering("gloam.model:Gloam", "builtins:repr")
no_name = registering("gloam.model.Gloam")
"""


def install(site: Path, group: str, names: str) -> None:
    """The package with these entry points: `name = value` with commas."""
    (site / "gloam").mkdir(parents=True)
    (site / "gloam/__init__.py").write_text(PLUGIN)
    (site / "gloam/model.py").write_text(MODEL)
    (info := site / "gloam-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gloam\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n" + names.replace(",", "\n") + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """gpt2-tiny under another architecture."""
    (model := tmp_path / "model").mkdir()
    for file in (BUNDLED_FOLDER / "gpt2-tiny").iterdir():
        if file.name != "config.json":
            (model / file.name).symlink_to(file)
    config = json.loads((BUNDLED_FOLDER / "gpt2-tiny/config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["GloamForCausalLM"]}))
    return model


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    return tmp_path / "site"


def asked(url: str) -> list[int]:
    body = {"prompt": "ROMEO:", "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


@pytest.mark.slow(keep="vllm.g")
@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm_in_stages.general_plugins"])
def test_a_package_s_model_serves_in_the_engine_process(group: str, site: Path, folder: Path) -> None:
    install(site, group, "gloam = gloam:register,other = gloam:for_vllm_alone")
    with LLM("gpt2-tiny", **SMALL) as llm:
        [plain] = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].token_ids
    words = ("--kv-cache-memory-bytes", "20000000", "--dtype", "float32", "-tp", "2")
    with closing(ServerProcess(str(folder), "--port", "0", *words)) as server:
        assert asked(server.wait_until_ready()) == [plain + 1]
        server.process.terminate()
        assert server.wait() == 0
        assert server.process.stdout is not None and "torch" not in server.process.stdout.read().split()
    left_out = [line for line in server.lines if "gloam:for_vllm_alone" in line]
    assert left_out and all("was left out (ModuleNotFoundError: No module named" in line for line in left_out)
    assert "Traceback" not in "".join(server.lines)


def serve(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stage01_cli", "serve", str(folder), *words]
    return subprocess.run(
        command, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )


def test_who_came_in_is_listed_and_can_be_kept_out(site: Path, folder: Path) -> None:
    install(site, "vllm.general_plugins", "gloam = gloam:register")
    dry = serve(folder, "--dry-run")
    assert dry.returncode == 0 and "model GloamForCausalLM" in dry.stdout, dry.stderr
    for variables in (
        {"STAGES_PLUGINS": ""},
        {"VLLM_PLUGINS": "other"},
        {"STAGES_PLUGINS": "", "VLLM_PLUGINS": "gloam"},
    ):
        out = serve(folder, "--dry-run", **variables)
        assert out.returncode == 2 and "architecture GloamForCausalLM is not supported; supported: GPT2" in out.stderr
        assert out.stderr.count("\n") == 1
    assert serve(folder, "--dry-run", VLLM_PLUGINS="gloam").returncode == 0


def test_a_server_of_a_known_model_calls_no_package(site: Path) -> None:
    install(site, "vllm.general_plugins", "gloam = gloam:for_vllm_alone")
    dry = serve(Path("gpt2-tiny"), "--dry-run")
    assert (dry.returncode, dry.stderr) == (0, "")


AT_CHECK = {
    "wrongly": "gloam:wrongly, which an installed package adds as gloam, registers wrongly: the model GPT2LMHeadModel is here already",
    "no_name": "gloam:no_name, which an installed package adds as gloam, registers wrongly: the model GloamForCausalLM: a class, or its name",
    "nowhere": "the model GloamForCausalLM: gloam.nowhere:Gloam: there is no module gloam.nowhere",
    "bad_reader": "config.json: what reads it for GloamForCausalLM failed (KeyError: 'no_such_key')",
    "no_shape": "config.json: what reads it for GloamForCausalLM failed (TypeError: ",
}


@pytest.mark.slow(keep=("wrongly", "bad_reader"))
@pytest.mark.parametrize("name", AT_CHECK)
def test_what_the_settings_show_is_refused_before_a_start(name: str, site: Path, folder: Path) -> None:
    install(site, "vllm.general_plugins", f"gloam = gloam:{name}")
    out = serve(folder, "--dry-run")
    assert out.returncode == 2 and AT_CHECK[name] in out.stderr and out.stderr.count("\n") == 1, out.stderr


LATER = {
    "no_class": "the model GloamForCausalLM: gloam.model:Nobody: module 'gloam.model' has no attribute 'Nobody'",
    "no_model": "the model GloamForCausalLM: builtins:dict: not a subclass of stage03_engine.core.models.layers:LanguageModel",
    "raises": "the model GloamForCausalLM: gloam.model:Raises: RuntimeError: no layers",
}


@pytest.mark.slow(keep="raises")
@pytest.mark.parametrize("name", LATER)
def test_what_only_the_class_shows_is_one_line(name: str, site: Path, folder: Path) -> None:
    install(site, "vllm.general_plugins", f"gloam = gloam:{name}")
    out = serve(folder, "--port", "0")
    assert out.returncode == 1 and "Traceback" not in out.stderr
    assert LATER[name] in out.stderr.splitlines()[-1]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugins, "INDEX", plugins.INDEX)
    monkeypatch.setattr(registry, "_registered", {})
    return


class Next(GPT2LMHeadModel):
    def compute_logits(self, hidden_states: Any) -> Any:
        return super().compute_logits(hidden_states).roll(1, dims=-1)


class AfterNext(GPT2LMHeadModel):
    def compute_logits(self, hidden_states: Any) -> Any:
        return super().compute_logits(hidden_states).roll(2, dims=-1)


def test_a_program_registers_a_class_and_another_one_later(registered: None, folder: Path) -> None:
    def first(model: str) -> int:
        with LLM(model, **SMALL) as llm:
            return llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].token_ids[0]

    ModelRegistry.register_model("GloamForCausalLM", Next)
    assert first(str(folder)) == first("gpt2-tiny") + 1
    ModelRegistry.register_model("GloamForCausalLM", AfterNext)
    assert first(str(folder)) == first("gpt2-tiny") + 2
    assert ModelRegistry.get_supported_archs().count("GloamForCausalLM") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("LlamaForCausalLM", "a:B"), "the model LlamaForCausalLM is here already: give yours another name"),
        (("Mine", "a.B"), "the model Mine: a class, or its name as module:Class, not 'a.B'"),
        (("Mine", ":B"), "not ':B'"),
        (("Mine", None), "not None"),
        (("My model", "a:B"), "the model 'My model': an architecture is one word"),
    ],
)
def test_what_cannot_be_registered(words: tuple[Any, Any], said: str, registered: None) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelRegistry.register_model(*words)
