"""The list of adapters in the front end: from Python, and over several engines that agree, refuse and die."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_adapters import merge, write_adapter
from small_gpt2 import first_layers
from steered_engines import Engines, SteeredEngine, config_of

from stage03_engine.arg_utils import AsyncEngineArgs, EngineArgs
from stage03_engine.bundled.training.ships_log import ships_log
from stage03_engine.bundled.training.train_adapter import Recipe, train_adapter
from stage03_engine.core.features.lora.manifest import bundled_adapters
from stage03_engine.errors import ConfigError, EngineDeadError, InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.adapters.registry import AdapterRegistry, KnownAdapter, run_blocking
from stage03_engine.frontend.features.call_forms.call_forms import LoRARequest
from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.sampling_params import SamplingParams

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 20_000_000, "max_model_len": 96, "device": "cpu", "dtype": "float32"}
ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(5, 40))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("adapters")
    model = Path(first_layers(base / "model", 1))
    for seed, name in enumerate(("poet", "painter"), start=1):
        write_adapter(base / name, model, seed=seed, strength=1.0)
        merge(base / f"merged {name}", model, base / name)
    return base


@pytest.fixture(scope="module")
def expected(files: Path) -> dict[str, list[int]]:
    found = {}
    for name in ("model", "merged poet", "merged painter"):
        with LLM(str(files / name), **SMALL) as llm:
            found[name.removeprefix("merged ")] = tokens(llm)
    assert len({str(each) for each in found.values()}) == 3
    return found


def tokens(llm: LLM, lora_request: Any = None) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY, lora_request=lora_request)[0].outputs[0].token_ids)


@pytest.mark.parametrize("multiprocess", [False, True])
def test_a_request_brings_its_adapter(multiprocess: bool, files: Path, expected: dict[str, list[int]]) -> None:
    poet, painter = (
        LoRARequest("poet", 7, str(files / "poet")),
        LoRARequest("painter", lora_path=str(files / "painter")),
    )
    with LLM(str(files / "model"), multiprocess=multiprocess, **ADAPTERS, **SMALL) as llm:
        for _ in range(2):
            assert tokens(llm, poet) == expected["poet"] and tokens(llm, painter) == expected["painter"]
        assert tokens(llm) == expected["model"] and tokens(llm, LoRARequest("poet")) == expected["poet"]
        chosen = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, lora="painter", lora_int_id=7)
        assert list(llm.generate(PROMPT, chosen)[0].outputs[0].token_ids) == expected["painter"], "by its name only"
        assert sorted(llm.call("list_loras")) == [1, 7]
        for wrong, says in (
            (LoRARequest("poet", 8), "poet is adapter number 7, from "),
            (LoRARequest("poet", 7, str(files / "painter")), "poet is adapter number 7, from "),
            (LoRARequest("another", 7, str(files / "painter")), "the number 7 was used already"),
            (LoRARequest("another", 9, str(files / "nowhere")), "adapter another: cannot read .*adapter_config.json"),
            (LoRARequest("another"), "there is no adapter 'another'; there are poet, painter"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                tokens(llm, wrong)
        assert tokens(llm, poet) == expected["poet"] and sorted(llm.call("list_loras")) == [1, 7]


def test_async_llm_has_the_four_calls_of_vllm(files: Path, expected: dict[str, list[int]]) -> None:
    poet, painter = LoRARequest("poet", 7, str(files / "poet")), LoRARequest("painter", 8, str(files / "painter"))

    async def tokens_of(engine: AsyncLLM, name: str, lora_request: Any) -> list[int]:
        async for output in engine.generate({"prompt_token_ids": PROMPT}, GREEDY, name, lora_request=lora_request):
            last = output
        return list(last.outputs[0].token_ids)

    async def use() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(files / "model"), **ADAPTERS, **SMALL))
        try:
            assert await engine.add_lora(poet) and not await engine.add_lora(poet)
            both = [
                tokens_of(engine, f"r{number}", each)
                for number, each in enumerate((poet, painter, painter, poet, None))
            ]
            names = ("poet", "painter", "painter", "poet", "model")
            assert await asyncio.gather(*both) == [expected[name] for name in names]
            assert await engine.list_loras() == {7, 8} and await engine.pin_lora(7)
            assert await engine.remove_lora(7) and not await engine.remove_lora(7)
            assert await engine.list_loras() == {8}
            with pytest.raises(InvalidRequestError, match="the number 7 was used already"):
                await engine.add_lora(poet)
            with pytest.raises(AttributeError, match="AsyncLLM has no attribute 'sub_lora'"):
                engine.sub_lora  # noqa: B018
        finally:
            engine.shutdown()

    asyncio.run(use())


def test_an_engine_without_adapters_says_so(files: Path) -> None:
    with LLM(str(files / "model"), **SMALL) as llm, pytest.raises(InvalidRequestError, match="there are none"):
        tokens(llm, LoRARequest("poet", 1, str(files / "poet")))


# Several engines, that do what a test says

DIGEST = "of the files"


@pytest.fixture(autouse=True)
def digest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters of steered engines have no files."""
    if "files" not in request.fixturenames:
        monkeypatch.setattr("stage03_engine.frontend.features.adapters.registry._digest", lambda *_: DIGEST)


class Knows(SteeredEngine):
    """An engine that has adapters, and refuses those in `refuses`."""

    refuses: set[str] = set()

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.loaded: dict[int, str] = {}
        self.before_requests: dict[str, set[int]] = {}

    async def call(self, method: str, *args: Any) -> Any:
        if method == "add_lora":
            name, number, _, digest = args
            assert digest == DIGEST
            if f"{name} in {self.index}" in self.refuses:
                raise InvalidRequestError(f"adapter {name}: no")
            assert number not in self.loaded
            self.loaded[number] = name
            return True
        if method == "list_loras":
            return sorted(self.loaded)
        return self.loaded.pop(*args, None) is not None

    async def add_request_async(self, request: Any) -> None:
        self.before_requests[request.request_id] = set(self.loaded)
        await super().add_request_async(request)


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def two_engines(refuses: set[str]) -> tuple[AdapterRegistry, DPLBAsyncMPClient, Engines]:
    Knows.refuses = refuses
    engines = Engines(Knows)
    client = DPLBAsyncMPClient(config_of(2), engines)
    client.start_process()
    await client.start()
    for index in (0, 1):
        engines[index].loaded[1] = "first"  # from its settings
    registry = AdapterRegistry([KnownAdapter("first", 1, "a/folder", DIGEST)])
    registry.follow(client)
    registry.follow(client)
    assert len(client.preparing) == 1
    return registry, client, engines


async def load(registry: AdapterRegistry, client: Any, name: str) -> int:
    return (await registry.changing(client, lambda: registry.loading(name, "folder"))).number


def test_all_engines_load_it_or_none() -> None:
    async def go() -> None:
        registry, client, engines = await two_engines({"b in 1"})
        assert await load(registry, client, "a") == 2
        with pytest.raises(InvalidRequestError, match="adapter b: no"):
            await load(registry, client, "b")
        assert [engines[index].loaded for index in (0, 1)] == [{1: "first", 2: "a"}] * 2
        assert registry.known.keys() == {"first", "a"}
        assert await load(registry, client, "c") == 4, "the number of what was refused is used again"
        assert await registry.changing(client, lambda: registry.unloading(registry.known["a"]))
        assert [engines[index].loaded for index in (0, 1)] == [{1: "first", 4: "c"}] * 2
        client.shutdown()

    asyncio.run(go())


def test_an_engine_that_starts_again_has_them_before_its_first_request() -> None:
    async def go() -> None:
        registry, client, engines = await two_engines(set())
        await load(registry, client, "a")
        engines[1].die()
        await turns()
        await load(registry, client, "b")  # while it is away
        assert engines[0].loaded == {1: "first", 2: "a", 3: "b"} and not engines[1].loaded
        engines[1].may_start.set()
        await turns()
        assert engines[1].loaded == {1: "first", 2: "a", 3: "b"}, (
            "also those that engines have from their settings at the start"
        )
        await registry.changing(client, lambda: registry.unloading(registry.known["first"]))
        await client.scale(3)
        assert engines[2].loaded == {2: "a", 3: "b"}, "what was unloaded does not come back"
        client.shutdown()

    asyncio.run(go())


def test_one_that_the_new_engine_refuses_is_unloaded_from_all() -> None:
    async def go() -> None:
        registry, client, engines = await two_engines(set())
        await load(registry, client, "a")
        await load(registry, client, "b")
        engines[1].die()
        await turns()
        Knows.refuses = {"a in 1"}
        engines[1].may_start.set()
        await turns()
        assert [engines[index].loaded for index in (0, 1)] == [{1: "first", 3: "b"}] * 2
        assert registry.known.keys() == {"first", "b"} and client.num_ready == 2
        client.shutdown()

    asyncio.run(go())


def test_a_dead_engine_does_not_leave_half_a_change() -> None:
    def dead(method: str, *args: Any) -> Any:
        raise EngineDeadError("gone")

    class Client:
        call = staticmethod(dead)

    registry = AdapterRegistry([])
    with pytest.raises(EngineDeadError):
        run_blocking(Client, registry.loading("a", "folder"))
    assert not registry.known
    silent = type("Silent", (), {"call": staticmethod(lambda *_: False)})
    with pytest.raises(InvalidRequestError, match="the engine did not load it"):
        run_blocking(silent, registry.loading("a", "folder"))
    assert not registry.known


# The bundled one


def test_the_bundled_adapter_is_there_by_its_name_alone() -> None:
    [name] = bundled_adapters()
    assert name == "gpt2-tiny-ship"
    with LLM("gpt2-tiny", lora_modules=(name, f"mine={name}"), **ADAPTERS, **SMALL) as llm:
        texts = {}
        for adapter in (None, name, "mine"):
            params = SamplingParams(temperature=0, max_tokens=48, lora=adapter)
            texts[adapter] = llm.generate("The king", params)[0].outputs[0].text
    assert texts[name] == texts["mine"] and "Wind" in texts[name] and "Wind" not in texts[None]
    with pytest.raises(ConfigError, match="'gpt2-tiny-shop' is not name=folder, and not bundled .as is gpt2-tiny-ship"):
        EngineArgs.from_kwargs(model="gpt2-tiny", enable_lora=True, lora_modules=("gpt2-tiny-shop",))
    files = (BUNDLED_FOLDER / name).iterdir()
    assert sum(file.stat().st_size for file in files) < 300_000


def test_training_gives_the_same_file_again(tmp_path: Path) -> None:
    """Also that it learns: from a few steps the held-out text is likelier already."""
    text = ships_log(1, 40)
    assert text == ships_log(1, 40) != ships_log(2, 40)
    few = Recipe(rank=2, alpha=4.0, steps=6, batch=2, window=32, seed=3)
    for name in ("one", "two"):
        before, after = train_adapter(text, tmp_path / name, how=few)
        assert after < before
    one, two = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_number_is_never_used_twice(files: Path, expected: dict[str, list[int]]) -> None:
    """Also not one that the front end has given, and a refused load takes nobody else's adapter away."""
    with LLM(str(files / "model"), **ADAPTERS, **SMALL) as llm:
        assert tokens(llm, LoRARequest("poet", lora_path=str(files / "poet"))) == expected["poet"]
        with pytest.raises(InvalidRequestError, match="the number 1 was used already"):
            tokens(llm, LoRARequest("painter", 1, str(files / "painter")))
        assert tokens(llm, LoRARequest("poet")) == expected["poet"]


def test_a_number_format_that_torch_lacks_is_one_line(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "poet", tmp_path / "odd")
    head = json.dumps(
        {"base_model.model.h.0.attn.c_attn.lora_A.weight": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}
    )
    head += " " * (-len(head) % 8)
    content = len(head).to_bytes(8, "little") + head.encode() + b"\0" * 4
    (tmp_path / "odd/adapter_model.safetensors").write_bytes(content)
    with LLM(str(files / "model"), **ADAPTERS, **SMALL) as llm:
        with pytest.raises(InvalidRequestError, match="^adapter odd: cannot read adapter_model.safetensors"):
            tokens(llm, LoRARequest("odd", lora_path=str(tmp_path / "odd")))
        assert tokens(llm)
