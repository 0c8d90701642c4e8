"""Adapters that come and go while the engine runs: each request's tokens are those that it gets alone."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from small_adapters import write_adapter
from small_gpt2 import first_layers

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.engine_core_proc import make_core
from stage03_engine.core.features.cuda_graphs.cuda_graphs import DecodeGraphs
from stage03_engine.core.features.lora.files import CONFIG, WEIGHTS, digest_in, digest_of, read_files
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.llm import LLM
from stage03_engine.messages import EngineCoreRequest, FinishReason
from stage03_engine.params.structured_outputs import StructuredOutputsParams
from stage03_engine.sampling_params import SamplingParams
from stage04_kernels.backends.native import library
from stagetrace import read_run

SMALL: dict[str, Any] = {
    "kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32", "linear_backend": "torch",
    "enable_lora": True, "max_lora_rank": 8, "check_invariants": True, "num_threads": 1,
}  # fmt: skip
STEM = list(range(5, 45))
PROMPTS = [STEM, STEM[:33], [7], [*STEM[:16], 9, 9], STEM * 2]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 5},
    "grammar": {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="[a-z ]{30}")},
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"max_loras": 4},
    "one place": {},
    "small cache": {"max_loras": 2, "max_cpu_loras": 2},
    "chunks": {"max_loras": 2, "max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preempted": {"max_loras": 3, "num_gpu_blocks_override": 16, "block_size": 8},
    "drafts": {"max_loras": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
    "ahead": {"max_loras": 2, "async_scheduling": True},
}  # fmt: skip


@dataclass
class Core:
    """An engine core, and what its requests got."""

    model: Path
    how: dict[str, Any]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, tuple[FinishReason, str | None]] = field(default_factory=dict)
    numbers: int = 100

    def __post_init__(self) -> None:
        self.core = make_core(EngineArgs.from_kwargs(model=str(self.model), **SMALL | self.how))

    def load(self, folder: Path, name: str = "mine") -> int:
        self.numbers += 1
        assert self.core.call("add_lora", name, self.numbers, str(folder)) is True
        return self.numbers

    def ask(self, request: str, adapter: int = 0, prompt: int = 0, kind: str = "greedy", max_tokens: int = 8) -> None:
        given: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True} | KINDS[kind]
        if adapter:
            given |= {"lora": "mine", "lora_int_id": adapter}
        self.core.add_request(EngineCoreRequest(request, PROMPTS[prompt], SamplingParams(**given)))
        self.tokens[request] = []

    def step(self, most: int = 1) -> None:
        while most and self.core.has_unfinished_requests:
            most -= 1
            for output in self.core.step().outputs:
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.ends[output.request_id] = (output.finish_reason, output.error)

    def run(self) -> None:
        self.step(10_000)
        assert not self.core.has_unfinished_requests


@contextlib.contextmanager
def running(model: Path, **how: Any) -> Iterator[Core]:
    core = Core(model, how)
    try:
        yield core
    finally:
        core.core.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(first_layers(tmp_path_factory.mktemp("model") / "model", 2))


@pytest.fixture(scope="module")
def folders(model: Path) -> list[Path]:
    makers = ({"rank": 4}, {"rank": 8, "only": "attn"}, {"rank": 1, "only": "1.mlp", "strength": 1.0}, {"rank": 3})
    return [
        Path(write_adapter(model.parent / str(number), model, number + 1, **how)) for number, how in enumerate(makers)
    ]


@pytest.fixture(scope="module")
def alone(model: Path, folders: list[Path]) -> dict[tuple[int | None, int, str], list[int]]:
    """(folder, prompt, kind) -> tokens."""
    found = {}
    with running(model, enable_prefix_caching=False) as core:
        for folder in (None, *range(len(folders))):
            number = 0 if folder is None else core.load(folders[folder])
            for prompt in range(len(PROMPTS)):
                for kind in KINDS:
                    request = f"{folder} {prompt} {kind}"
                    core.ask(request, number, prompt, kind)
                    core.run()
                    found[folder, prompt, kind] = core.tokens[request]
    assert len({str(tokens) for (_, prompt, kind), tokens in found.items() if (prompt, kind) == (0, "greedy")}) == 5
    return found


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def core(request: pytest.FixtureRequest, model: Path) -> Iterator[Core]:
    with running(model, **CONFIGURATIONS[request.param]) as core:
        yield core


asks = st.tuples(
    st.just("ask"), st.sampled_from([None, 0, 0, 1, 2]), st.integers(0, len(PROMPTS) - 1), st.sampled_from([*KINDS])
)
lives = st.lists(asks | st.tuples(st.just("step"), st.integers(1, 4)) | st.tuples(st.just("again"), st.integers(0, 2), st.integers(0, 3)), min_size=4, max_size=20)  # fmt: skip


@pytest.mark.slow(keep=("one place", "preempted"))
@settings(max_examples=8)
@given(lives)
def test_whatever_comes_and_goes_each_request_gets_the_tokens_that_it_gets_alone(
    core: Core, folders: list[Path], alone: dict[tuple[int | None, int, str], list[int]], life: list[Any]
) -> None:
    """Names a, b, c, which are loaded again in the middle with the same or other weights."""
    loaded, expected = dict[int, tuple[int, int]](), dict[str, list[int]]()
    for place, (what, *more) in enumerate(life):
        if what == "step":
            core.step(more[0])
        elif what == "again":
            name, folder = more
            if name in loaded:
                assert core.core.call("remove_lora", loaded.pop(name)[0]) is True
            loaded[name] = (core.load(folders[folder]), folder)
        else:
            name, prompt, kind = more
            if name is not None and name not in loaded:
                loaded[name] = (core.load(folders[name]), name)
            number, folder = (0, None) if name is None else loaded[name]
            core.ask(f"{core.numbers} {place}", number, prompt, kind)
            expected[f"{core.numbers} {place}"] = alone[folder, prompt, kind]
    core.run()
    assert {request: core.tokens.pop(request) for request in expected} == expected
    for number, _ in loaded.values():
        assert core.core.call("remove_lora", number) is True
    assert core.core.call("list_loras") == []


def test_numbers_of_what_is_loaded(model: Path, folders: list[Path]) -> None:
    with running(model, lora_modules=(f"start={folders[1]}",), max_loras=2) as core:
        call = core.core.call
        assert call("list_loras") == [1]
        assert call("add_lora", "x", 5, str(folders[0])) is True and call("list_loras") == [1, 5]
        assert call("add_lora", "y", 5, str(folders[0])) is False, "the number is taken"
        assert call("pin_lora", 5) is True and call("pin_lora", 6) is False
        with pytest.raises(InvalidRequestError, match="pinning 'start' leaves no place for other adapters"):
            call("pin_lora", 1)
        assert call("remove_lora", 1) is True and call("remove_lora", 1) is False and call("list_loras") == [5]
        with pytest.raises(InvalidRequestError, match="lora_int_id must be at least 1"):
            call("add_lora", "x", 0, str(folders[0]))
        with pytest.raises(
            InvalidRequestError, match="adapter x: cannot read .*/nowhere/adapter_config.json: No such file"
        ):
            call("add_lora", "x", 9, "/nowhere")
        (model.parent / "torn").mkdir(exist_ok=True)
        shutil.copytree(folders[0], model.parent / "torn", dirs_exist_ok=True)
        whole = (folders[0] / "adapter_model.safetensors").read_bytes()
        (model.parent / "torn" / "adapter_model.safetensors").write_bytes(whole[:-100])
        with pytest.raises(InvalidRequestError, match=r"adapter x: cannot read adapter_model\.safetensors"):
            call("add_lora", "x", 9, str(model.parent / "torn"))
        assert call("list_loras") == [5]
        core.ask("after all that", 5)
        core.run()
        assert len(core.tokens["after all that"]) == 8


def test_an_engine_without_adapters_says_so(model: Path) -> None:
    with (
        running(model, enable_lora=False) as core,
        pytest.raises(InvalidRequestError, match="start it with --enable-lora"),
    ):
        core.core.call("add_lora", "x", 1, "/nowhere")


@pytest.mark.parametrize("how", [{}, {"async_scheduling": True}], ids=["plain", "ahead"])
def test_an_adapter_whose_folder_has_changed(
    how: dict[str, Any], model: Path, folders: list[Path], alone: dict[Any, list[int]], tmp_path: Path
) -> None:
    """Its requests fail with a line, the others go on; and nothing that was computed without it is found again."""
    folder = Path(shutil.copytree(folders[0], tmp_path / "adapter"))
    with running(model, max_cpu_loras=1, **how) as core:
        first, other = core.load(folder), core.load(folders[3])
        core.ask("before", first)
        core.ask("makes room", other)
        core.run()
        shutil.move(folder, tmp_path / "moved")
        for request, adapter in (("gone", first), ("base", 0), ("gone too", first)):
            core.ask(request, adapter)
        core.run()
        core.ask("other", other)
        core.run()
        shutil.copytree(folders[1], folder)
        core.ask("changed", first)
        core.run()
        shutil.rmtree(folder)
        shutil.move(tmp_path / "moved", folder)
        core.ask("there again", first)
        core.run()
    for request, why in (
        ("gone", "cannot read"),
        ("gone too", "cannot read"),
        ("changed", "are no longer those that were loaded"),
    ):
        reason, error = core.ends[request]
        assert reason == FinishReason.ERROR and (error or "").startswith("adapter mine: ") and why in (error or "")
        assert core.tokens[request] == [] and "\n" not in (error or "")
    for request, number in (("before", 0), ("base", None), ("other", 3), ("makes room", 3), ("there again", 0)):
        assert core.tokens[request] == alone[number, 0, "greedy"], request


@pytest.mark.slow(keep="40")
@pytest.mark.parametrize("turns", [40, 1000])
def test_memory_does_not_grow(turns: int, model: Path, folders: list[Path]) -> None:
    """A thousand loads, used now and then. If each left its adapter behind, that would be hundreds of megabytes."""
    weights = (folders[0] / "adapter_model.safetensors").stat().st_size
    with running(model, max_loras=2, max_cpu_loras=3, check_invariants=False) as core:
        used, process = list[int](), psutil.Process(os.getpid())
        for turn in range(turns):
            number = core.load(folders[0])
            if turn % 20 == 0:
                core.ask("now and then", number, 2, max_tokens=1)
            assert core.core.call("remove_lora", number) is True
            core.run()
            if turn + 1 in (turns // 5, turns):
                used.append(process.memory_info().rss)
        [hook] = [each for each in core.core.executor.worker.model_runner.hooks if hasattr(each, "adapters")]
        left = hook.adapters
        assert len(left._sources) <= 1 and len(left.cached) <= 1 and len(left.places) <= 1
    assert used[1] - used[0] < 100 * weights, "an eighth of what came and went is still there"


def test_the_trace_tells_of_places(model: Path, folders: list[Path], tmp_path: Path) -> None:
    modules = tuple(f"a{number}={folder}" for number, folder in enumerate(folders))
    with LLM(
        str(model), **SMALL | {"lora_modules": modules, "trace": str(tmp_path / "trace"), "max_cpu_loras": 2}
    ) as llm:
        params = [SamplingParams(temperature=0, max_tokens=2, lora=name) for name in ("a0", "a1", "a0")]
        llm.generate([[7]] * 3, params)  # type: ignore[arg-type]
        assert llm.call("remove_lora", 1) is True
    run = read_run(tmp_path / "trace")
    assert [event.args["adapter"] for event in run.named("lora.loaded")] == ["a0", "a1", "a2", "a3", "a0", "a1"]
    placed = [(event.args["adapter"], event.args["place"], event.args["evicted"]) for event in run.named("lora.placed")]
    assert placed == [("a0", 0, None), ("a1", 0, 1)]
    assert [event.args for event in run.named("lora.dropped")] == [{"id": 1, "adapter": "a0"}]
    assert [event.req for event in run.named("lora.waiting")] == ["r1"]


@pytest.mark.slow(keep=("float32", "pairs"))
@pytest.mark.skipif(library.problem() is not None, reason=str(library.problem()))
@pytest.mark.parametrize(
    "how",
    [{}, {"dtype": "bfloat16"}, {"lora_dtype": "bfloat16", "linear_backend": "native"}],
    ids=["float32", "bfloat16", "pairs of another format"],
)
def test_recorded_steps_add_what_the_adapters_of_their_rows_do(
    how: dict[str, Any], model: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are recorded before any adapter is in its place. The bits are those of steps that are not recorded, whichever rows have which."""
    replayed, plain_forward = list[bool](), DecodeGraphs.forward

    def forward(graphs: DecodeGraphs, *inputs: Any) -> torch.Tensor:
        replayed.append(True)
        return plain_forward(graphs, *inputs)

    monkeypatch.setattr(DecodeGraphs, "forward", forward)
    found = []
    for eager in (False, True):
        settings = SMALL | {"attention_backend": "native", "enforce_eager": eager, "max_loras": 2, "max_cpu_loras": 3}
        settings |= {"lora_modules": tuple(f"a{number}={folder}" for number, folder in enumerate(folders[:3]))}
        with LLM(str(model), **settings | how) as llm:
            common: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 1}
            names = [None, "a0", "a1", "a2"] * 2
            params = [SamplingParams(max_tokens=3 + 2 * n, lora=name, **common) for n, name in enumerate(names)]
            outputs = llm.generate([PROMPTS[number % 4] for number in range(8)], params)
            found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    assert replayed and found[0] == found[1]


# Several workers


def break_pair(folder: Path, layer: str) -> None:
    """Remove one of its two tensors."""
    tensors = load_file(folder / WEIGHTS)
    del tensors[f"base_model.model.transformer.{layer}.lora_B.weight"]
    save_file(tensors, folder / WEIGHTS)


SEVERAL: dict[str, dict[str, Any]] = {
    "two slices": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


@pytest.mark.slow(keep="two slices")
@pytest.mark.parametrize("how", SEVERAL.values(), ids=SEVERAL)
def test_several_workers_make_the_same_tokens(
    how: dict[str, Any], model: Path, folders: list[Path], alone: dict[Any, list[int]], tmp_path: Path
) -> None:
    """Slices of layers, and stages with some of the layers. What one worker cannot read, none of them uses, and all say why."""
    folder = Path(shutil.copytree(folders[0], tmp_path / "adapter"))
    chunks = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": False}
    with running(model, **how, **chunks, max_loras=2, check_invariants=False) as core:
        numbers = [core.load(folder), *map(core.load, folders[1:])]
        for prompt in range(len(PROMPTS)):
            for number, adapter in enumerate([0, *numbers]):
                core.ask(f"{number - 1} {prompt}", adapter, prompt)
        core.run()
        got = dict(core.tokens)
        assert core.core.call("remove_lora", numbers[3]) is True
        with pytest.raises(InvalidRequestError, match="adapter mine: cannot read"):
            core.load(tmp_path)
        for layer in (0, 1):  # of which a stage has one
            other = Path(shutil.copytree(folders[3], tmp_path / f"broken {layer}"))
            break_pair(other, f"h.{layer}.attn.c_attn")
            core.ask(f"meanwhile {layer}", numbers[1])  # stages have several chunks of it in flight
            core.step()
            with pytest.raises(InvalidRequestError, match=rf"adapter mine: lora_B of h.{layer}.attn.c_attn is missing"):
                core.load(other)
            core.run()
            assert core.tokens[f"meanwhile {layer}"] == alone[1, 0, "greedy"]
        shutil.rmtree(folder)
        core.ask("gone", numbers[0])
        core.run()
        assert core.ends["gone"][0] == FinishReason.ERROR
        core.ask("after it", numbers[1])
        core.run()
        assert core.tokens["after it"] == alone[1, 0, "greedy"]
    expected = partial(lambda number, prompt: alone[number if number >= 0 else None, prompt, "greedy"])
    for number in range(-1, len(folders)):
        for prompt in range(len(PROMPTS)):
            assert got[f"{number} {prompt}"] == expected(number, prompt), (number, prompt)


@pytest.mark.parametrize("what", ["a pipe", "too large", "a folder"])
def test_what_a_file_has_become_is_one_line(what: str, tmp_path: Path) -> None:
    """It was an adapter when it was loaded. To read a pipe would hold the engine up for ever, and a terabyte end it."""
    for name in (CONFIG, WEIGHTS):
        (tmp_path / name).write_bytes(b"{}")
    assert read_files(tmp_path) == (b"{}", b"{}")
    file = tmp_path / WEIGHTS
    if what == "too large":
        os.truncate(file, 1 << 40)
    else:
        file.unlink()
        os.mkfifo(file) if what == "a pipe" else file.mkdir()
    with pytest.raises(ConfigError, match=f"^cannot read {re.escape(str(file))}: "):
        read_files(tmp_path)


def test_a_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    """Read piece by piece, or whole; and what moves from one file to the other is another adapter."""
    found = set()
    for config, weights in ((b"{}", b"x" * 3_000_000), (b"{}x", b"x" * 2_999_999), (b"", b""), (b"{}", b"")):
        (tmp_path / CONFIG).write_bytes(config)
        (tmp_path / WEIGHTS).write_bytes(weights)
        found.add(digest_in(str(tmp_path)))
        assert (
            digest_in(str(tmp_path)) == digest_in(str(tmp_path), str(tmp_path.parent)) == digest_of((config, weights))
        )
    assert len(found) == 4


@pytest.mark.parametrize("what", ["root/a", "root/a/b", f"root/a/b/{CONFIG}", f"root/a/b/{WEIGHTS}", "root/a/b/gone"])
def test_a_link_that_comes_between_the_check_and_the_opening(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is exchanged for a link to the outside, once the path was found to be below the root: nothing outside is opened."""
    for place in ("root/a/b", "outside/a/b"):
        (tmp_path / place).mkdir(parents=True)
        for name in (CONFIG, WEIGHTS):
            (tmp_path / place / name).write_bytes(place.encode())
    root, real = str(tmp_path / "root"), os.path.realpath
    right = digest_in(str(tmp_path / "root/a/b"), root)
    below = tmp_path / what

    def then_exchange(path: Any) -> str:
        found = real(path)
        if str(path).endswith(WEIGHTS if WEIGHTS in what else CONFIG) and below.exists():
            below.rename(tmp_path / "aside")
            below.symlink_to(tmp_path / "outside" / below.relative_to(root))
        return found

    monkeypatch.setattr("stage03_engine.core.features.lora.files.os.path.realpath", then_exchange)
    if what.endswith("gone"):
        assert digest_in(str(tmp_path / "root/a/b"), root) == right
        return
    with pytest.raises(ConfigError, match="^cannot read .*: (Too many levels of symbolic links|Not a directory)$"):
        digest_in(str(tmp_path / "root/a/b"), root)


@pytest.mark.parametrize("where", ["..", "../outside", "link", "/etc"])
def test_what_lies_outside_of_the_root_when_it_is_opened(where: str, tmp_path: Path) -> None:
    for place in ("root", "outside"):
        (tmp_path / place).mkdir()
    for name in (CONFIG, WEIGHTS):
        (tmp_path / "outside" / name).write_bytes(b"{}")
        (tmp_path / name).write_bytes(b"{}")
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="^cannot read .*: it is not below the folder that --lora-root names$"):
        digest_in(str(tmp_path / "root" / where), str(tmp_path / "root"))


def test_an_adapter_whose_files_are_no_longer_those_of_the_digest(
    model: Path, folders: list[Path], tmp_path: Path
) -> None:
    """Every place where files are read: when it is loaded, and when an engine starts."""
    folder = Path(shutil.copytree(folders[0], tmp_path / "adapter"))
    first = digest_in(str(folder))
    settings = EngineArgs.from_kwargs(model=str(model), **SMALL, lora_modules=(f"mine={folder}",))
    for name in (CONFIG, WEIGHTS):
        content = (folder / name).read_bytes()
        changed = content.replace(b"8.0", b"4.0") if name == CONFIG else content[:-1] + bytes([content[-1] ^ 1])
        assert changed != content
        for other in (changed, b"nothing of an adapter"):  # of which nothing is told
            (folder / name).write_bytes(other)
            with running(model) as core:
                with pytest.raises(
                    InvalidRequestError, match="^adapter mine: the files in .* are no longer those that were loaded$"
                ):
                    core.core.call("add_lora", "mine", 7, str(folder), first)
                assert core.core.call("list_loras") == []
            with pytest.raises(
                ConfigError, match="^adapter mine: the files in .* are no longer those that were loaded$"
            ):
                make_core(settings)
        (folder / name).write_bytes(content)
    with running(model) as core:
        assert core.core.call("add_lora", "mine", 7, str(folder), first) is True
