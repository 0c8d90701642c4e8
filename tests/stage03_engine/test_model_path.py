"""Where models are found, and what their config.json may say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, strategies as st
from patience import PATIENCE

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.errors import ConfigError, ModelNotFoundError, StagesError
from stage03_engine.model_path import BUNDLED_FOLDER, bundled_models, has_model, known_shapes, read_shape, resolve_model
from stage03_engine.model_shape import ModelShape

CONFIG: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 3,
    "n_positions": 64, "vocab_size": 100, "layer_norm_epsilon": 1e-6, "eos_token_id": 99, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPE = ModelShape("GPT2LMHeadModel", 100, 2, 3, 3, 16, 48, 192, 64, 1e-6, "bfloat16", 99)
WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"


def model_folder(path: Path, *files: str, **changes: Any) -> Path:
    """A folder with a config.json and empty files; a change to `...` removes the key."""
    path.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))
    for name in files:
        (path / name).touch()
    return path


def test_a_folder_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "my-model", WEIGHTS, TOKENIZER)
    found = resolve_model(str(folder))
    assert (found.model_path, found.tokenizer_path, found.where) == (str(folder), str(folder), "folder")
    assert found.shape == SHAPE
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my-model").model_path == str(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/my-model").model_path == str(folder)


def test_the_bundled_model_is_found_and_its_tokenizer_can_be_borrowed(tmp_path: Path) -> None:
    assert "gpt2-tiny" in bundled_models()
    found = resolve_model("gpt2-tiny")
    assert (found.where, found.model_path) == ("bundled", found.tokenizer_path)
    assert found.shape.max_position_embeddings >= 512
    borrower = model_folder(tmp_path, WEIGHTS)
    assert resolve_model(str(borrower), tokenizer="gpt2-tiny").tokenizer_path == found.tokenizer_path


def test_a_folder_goes_before_a_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path / "gpt2-tiny", WEIGHTS, TOKENIZER)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("gpt2-tiny").where == "folder"


@pytest.mark.parametrize("name", [*known_shapes(), "gpt-2"])
def test_dummy_weights_of_a_known_shape_need_no_file(name: str) -> None:
    found = resolve_model(name, "dummy")
    assert (found.model_path, found.tokenizer_path) == (None, None)
    assert found.shape == known_shapes()[found.name]
    assert found.name == name.replace("gpt-2", "gpt2")


# Published parameter counts with tied embeddings, as `sum(p.numel() for p in model.parameters())` gives them.
@pytest.mark.parametrize(
    "name, count",
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_known_shapes_have_the_published_number_of_parameters(name: str, count: int) -> None:
    shape = known_shapes()[name]
    d, inner = shape.hidden_size, shape.intermediate_size
    block = 4 * d + (3 * d * d + 3 * d) + (d * d + d) + (d * inner + inner) + (inner * d + d)
    total = shape.vocab_size * d + shape.max_position_embeddings * d + shape.num_layers * block + 2 * d
    assert total == count
    assert shape.num_heads * shape.head_dim == d


def test_dummy_weights_of_a_folder_need_only_its_config(tmp_path: Path) -> None:
    found = resolve_model(str(model_folder(tmp_path)), "dummy")
    assert (found.model_path, found.tokenizer_path, found.shape) == (str(tmp_path), None, SHAPE)
    (tmp_path / "vocab.json").touch()
    assert resolve_model(str(tmp_path), "dummy").tokenizer_path is None
    (tmp_path / "merges.txt").touch()
    assert resolve_model(str(tmp_path), "dummy").tokenizer_path == str(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "file").touch()
    cases = [
        (empty, "no config.json"),
        (model_folder(tmp_path / "no-weights", TOKENIZER), "no weights in .*--load-format dummy"),
        (model_folder(tmp_path / "no-tokenizer", WEIGHTS), "has no tokenizer .*--tokenizer"),
        (tmp_path / "missing", "no model at .*no such folder"),
        (tmp_path / "file", "no model at .*it is a file"),
    ]
    for path, message in cases:
        with pytest.raises(ModelNotFoundError, match=message) as refusal:
            resolve_model(str(path))
        assert str(path) in str(refusal.value)
    with pytest.raises(ModelNotFoundError, match="has no tokenizer"):
        resolve_model("gpt2", "dummy", tokenizer=str(empty))
    for name in ("a" * 5000, "/" + "a" * 5000, "a/" + "a" * 300, "a\0b"):  # no path of any file
        for load_format in ("auto", "dummy"):
            with pytest.raises(ModelNotFoundError):
                resolve_model(name, load_format)


def test_every_shard_must_be_there(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, TOKENIZER, "a.safetensors")
    index = {"weight_map": {"wte.weight": "a.safetensors", "wpe.weight": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match=r"weights are missing in .*: b\.safetensors"):
        resolve_model(str(folder))
    (folder / "b.safetensors").touch()
    resolve_model(str(folder))


@pytest.mark.parametrize(
    "changes, field, value",
    [
        ({"n_positions": ..., "n_ctx": 32}, "max_position_embeddings", 32),
        ({"n_ctx": 32}, "max_position_embeddings", 64),
        ({"n_inner": None}, "intermediate_size", 192),
        ({"n_inner": 50}, "intermediate_size", 50),
        ({"architectures": ...}, "architecture", "GPT2LMHeadModel"),
        ({"dtype": "float16"}, "torch_dtype", "float16"),
        ({"torch_dtype": ...}, "torch_dtype", "float32"),
        ({"eos_token_id": ...}, "eos_token_id", None),
        ({"layer_norm_epsilon": ...}, "layer_norm_epsilon", 1e-5),
        ({"activation_function": ...}, "activation_function", "gelu_new"),
        ({"activation_function": "relu"}, "activation_function", "relu"),
        ({"scale_attn_weights": False}, "scale_attn_weights", False),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx", True),
        ({"tie_word_embeddings": False}, "tie_word_embeddings", False),
        ({"tie_word_embeddings": ...}, "tie_word_embeddings", True),
        ({"vocab_size": 3}, "vocab_size", 3),
    ],
)
def test_shapes_are_read(changes: dict[str, Any], field: str, value: Any, tmp_path: Path) -> None:
    assert getattr(read_shape(model_folder(tmp_path, **changes)), field) == value


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["GPTJForCausalLM"]}, "architecture GPTJForCausalLM is not supported; supported: GPT2LM"),
        ({"architectures": ..., "model_type": "gptj"}, "architecture none is not supported"),
        ({"n_embd": 50}, "n_embd = 50 is not a multiple of n_head = 3"),
        ({"n_embd": "48"}, "n_embd must be a positive integer"),
        ({"n_layer": 0}, "n_layer must be a positive integer"),
        ({"n_head": ...}, "n_head must be a positive integer, not None"),
        ({"n_positions": ...}, "n_positions must be a positive integer"),
        ({"vocab_size": True}, "vocab_size must be a positive integer"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon"),
        ({"torch_dtype": "int8"}, "number format 'int8' is not supported"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be an integer or a list"),
        ({"activation_function": "prelu"}, "activation_function = 'prelu' is not supported, only 'gelu_new', "),
        ({"activation_function": None}, "activation_function = None is not supported"),
        ({"activation_function": ["relu"]}, "activation_function = .'relu'. is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        ({"scale_attn_by_inverse_layer_idx": 1}, "scale_attn_by_inverse_layer_idx must be true or false, not 1"),
        ({"scale_attn_weights": "no"}, "scale_attn_weights must be true or false"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings must be true or false"),
    ],
)
def test_unusable_configs_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        resolve_model(str(model_folder(tmp_path, **changes)), "dummy")
    assert str(tmp_path / "config.json") in str(refusal.value)


def test_an_activation_whose_feature_was_taken_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage03_engine.plugins.INDEX", ())
    assert read_shape(model_folder(tmp_path)).activation_function == "gelu_new"
    with pytest.raises(ConfigError, match="activation_function = 'relu' is not supported"):
        read_shape(model_folder(tmp_path, activation_function="relu"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_corrupt_configs_are_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        resolve_model(str(tmp_path), "dummy")
    assert "\n" not in str(refusal.value)


RELATIVES = ["activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2),
)


@given(
    changes=st.dictionaries(st.sampled_from([*CONFIG, "n_inner", "n_ctx", "dtype", *RELATIVES]), ANYTHING, max_size=3)
)
def test_any_config_gives_a_sound_shape_or_a_refusal(changes: dict[str, Any], tmp_path: Path) -> None:
    try:
        shape = read_shape(model_folder(tmp_path, **changes))
    except ConfigError:
        return
    assert shape.num_heads * shape.head_dim == shape.hidden_size
    assert min(shape.num_layers, shape.vocab_size, shape.intermediate_size, shape.max_position_embeddings) >= 1


# The hub: huggingface_hub reads its environment when it is imported, so each of these runs in a process of its own.

RESOLVE = """
import json, sys
from types import SimpleNamespace
from stage03_engine.errors import StagesError
from stage03_engine.model_path import resolve_model
try:
    *words, settings = sys.argv[1:]
    found = resolve_model(*words, settings=SimpleNamespace(**json.loads(settings)))
    print(found.where, found.name, found.model_path, found.shape.num_layers)
except StagesError as error:
    print(type(error).__name__, error)
"""


def resolve_elsewhere(*arguments: str, settings: dict[str, str] | None = None, **environ: str) -> str:
    """What `resolve_model(*arguments)` gives in a new process."""
    more = json.dumps(settings or {})
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, *arguments, more],
        env=os.environ | environ, capture_output=True, text=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    return done.stdout.strip()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP API as a download needs; it holds one model, `gpt2`, of which the revision `v2` has more layers
    and pickled weights."""

    main: ClassVar[dict[str, bytes]] = {
        "config.json": json.dumps(CONFIG).encode(), WEIGHTS: b"weights", TOKENIZER: b"{}", "flax_model.msgpack": b"no",
    }  # fmt: skip
    v2: ClassVar[dict[str, bytes]] = {
        "config.json": json.dumps(CONFIG | {"n_layer": 3}).encode(), "pytorch_model.bin": b"weights", TOKENIZER: b"{2}",
    }  # fmt: skip
    commits: ClassVar[dict[str, str]] = {"main": "a" * 40, "v2": "b" * 40}
    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        Hub.paths.append(path)
        second = "v2" in path.split("/") or self.commits["v2"] in path.split("/")
        files, commit = (self.v2, self.commits["v2"]) if second else (self.main, self.commits["main"])
        names = list(files)
        headers = {}
        if path.startswith("/api/models/gpt2/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": f"{names.index(name) + 9 * second:040x}"}
                for name, content in files.items()
            ]
            body = json.dumps(entries).encode()
        elif path == "/api/models/gpt2" or path.removeprefix("/api/models/gpt2/revision/") in self.commits:
            siblings = [{"rfilename": name} for name in names]
            body = json.dumps({"id": "gpt2", "sha": commit, "siblings": siblings}).encode()
        elif path.startswith("/gpt2/resolve/"):
            name = path.rpartition("/")[2]
            body = files[name]
            headers = {"ETag": f'"{names.index(name) + 9 * second:040x}"', "X-Repo-Commit": commit}
        else:
            self.send_response(404)
            unknown = path.startswith("/api/models/gpt2/revision/")
            body, headers = b"", {"X-Error-Code": "RevisionNotFound" if unknown else "RepoNotFound"}
        if body:
            self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.paths.clear()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_is_downloaded_once_and_then_cached(hub: str, tmp_path: Path) -> None:
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
    first = resolve_elsewhere("gpt-2", **online)
    assert first.startswith("hub gpt2 ") and first.endswith(" 2")
    assert not any("flax" in path for path in Hub.paths)
    again = resolve_elsewhere("gpt2", **online | {"HF_HUB_OFFLINE": "1"})
    assert again == first.replace("hub", "cache", 1)
    (tmp_path / again.split()[2] / WEIGHTS).unlink()  # a cache that lost its weights is no model,
    shutil.rmtree(tmp_path / "hub/models--gpt2/trees", ignore_errors=True)  # also for a library that keeps no listing
    assert resolve_elsewhere("gpt2", **online).startswith("hub gpt2 ")


@pytest.mark.slow
def test_another_revision_in_another_folder(hub: str, tmp_path: Path) -> None:
    """Both revisions are cached side by side. The second has pickled weights only."""
    home, other = tmp_path / "home", tmp_path / "other"
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub, "HF_HOME": str(home)}
    offline = online | {"HF_HUB_OFFLINE": "1"}
    assert resolve_elsewhere("gpt2", settings={"download_dir": str(other)}, **online).endswith(" 2")
    assert not home.exists() or not list(home.rglob("config.json"))
    second = resolve_elsewhere("gpt2", settings={"download_dir": str(other), "revision": "v2"}, **online)
    assert second.startswith("hub gpt2 ") and second.endswith(" 3") and str(other) in second
    assert [path.name for path in Path(second.split()[2]).glob("*.bin")] == ["pytorch_model.bin"]
    for revision, layers in (("main", 2), ("v2", 3)):
        again = resolve_elsewhere("gpt2", settings={"download_dir": str(other), "revision": revision}, **offline)
        assert again.startswith("cache ") and again.endswith(f" {layers}")
    assert "HF_HUB_OFFLINE forbids" in resolve_elsewhere("gpt2", settings={"revision": "v2"}, **offline)
    assert "the hub has no such revision of it" in resolve_elsewhere("gpt2", settings={"revision": "v3"}, **online)


@pytest.mark.parametrize("where", ["gpt2-tiny", "a folder"])
@pytest.mark.parametrize("name", ["revision", "tokenizer_revision"])
def test_what_has_one_version_has_no_revisions(name: str, where: str, tmp_path: Path) -> None:
    model = where if where == "gpt2-tiny" else str(shutil.copytree(BUNDLED_FOLDER / "gpt2-tiny", tmp_path / "model"))
    assert EngineArgs.from_kwargs(model=model, **{name: "main"}).model_config.model_path is not None
    with pytest.raises(ConfigError, match=f"^{name} 'v2': .* does not come from the hub, and has one version"):
        EngineArgs.from_kwargs(model=model, **{name: "v2"})


def test_the_tokenizer_may_have_a_revision_of_its_own(hub: str, tmp_path: Path) -> None:
    script = (
        "import sys; from stage03_engine.arg_utils import EngineArgs;"
        "model = EngineArgs.from_kwargs(model='gpt2', revision='main', tokenizer_revision='v2', device='cpu', max_model_len=9).model_config;"
        "print(open(model.tokenizer_path + '/tokenizer.json').read(), open(model.model_path + '/tokenizer.json').read())"
    )
    environ = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout.split() == ["{2}", "{}"]


def test_shards_that_are_missing_are_no_complete_copy(tmp_path: Path) -> None:
    """So an interrupted download is resumed."""
    folder = model_folder(tmp_path, "a.bin", TOKENIZER)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "a.bin", "y": "b.bin"}}')
    assert not has_model("auto", folder) and not has_model("pt", folder)
    (folder / "b.bin").touch()
    assert has_model("auto", folder) and has_model("pt", folder) and not has_model("safetensors", folder)


def test_the_hub_does_not_have_it(hub: str, tmp_path: Path) -> None:
    answer = resolve_elsewhere("gpt2-tinny", HF_HUB_OFFLINE="0", HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert answer.startswith("ModelNotFoundError model 'gpt2-tinny' ")
    assert "the hub has no such model; did you mean gpt2-tiny?" in answer


@pytest.mark.parametrize(
    "environ",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "unreachable"],
)
def test_without_a_hub_the_answer_says_what_works(environ: dict[str, str], tmp_path: Path) -> None:
    answer = resolve_elsewhere("gpt2", HF_HOME=str(tmp_path), **environ)
    assert answer.startswith("ModelNotFoundError model 'gpt2' ") and "\n" not in answer
    assert "gpt2-tiny (bundled)" in answer and "--load-format dummy" in answer


def test_dummy_weights_never_ask_the_hub(hub: str, tmp_path: Path) -> None:
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}
    assert resolve_elsewhere("gpt2", "dummy", **online) == "known shape gpt2 None 12"
    assert "does not ask the hub" in resolve_elsewhere("someone/model", "dummy", **online)
    assert "does not ask the hub" in resolve_elsewhere("gpt2", "dummy", "someone/tokenizer", **online)
    assert Hub.paths == []


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b/c", "../gpt2-tiny", "~nobody-of-this-name/x", "x\0y", "é"])
def test_names_that_no_model_can_have(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StagesError):
        resolve_model(name)


def test_without_the_features_that_read_them_nothing_is_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index says that one file is not all of the weights."""
    folder = model_folder(tmp_path, WEIGHTS, TOKENIZER, "model.safetensors.index.json")
    monkeypatch.setattr("stage03_engine.plugins.INDEX", ())
    with pytest.raises(ConfigError, match=r"what reads model\.safetensors\.index\.json is not installed"):
        resolve_model(str(folder))
    with pytest.raises(
        ConfigError, match="'gpt2' is neither a folder nor bundled, and what asks the hub is not installed"
    ):
        resolve_model("gpt-2")
    assert resolve_model("gpt2-tiny").where == "bundled"
