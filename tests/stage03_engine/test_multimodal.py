"""Models that see: LLaVA against transformers on the same random weights, whatever the scheduler does with a prompt."""

from __future__ import annotations

import itertools
import json
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from seeing_engine import SETTINGS, SeeingEngine as Engine, same_answers
from small_llava import PLACES, llava_folder, picture
from toy_engine import record

from stage03_engine.arg_utils import EngineArgs
from stage03_engine.config import VllmConfig
from stage03_engine.core.features.multimodal.messages import WORK
from stage03_engine.core.hooks import SchedulerHook
from stage03_engine.core.request import Request
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.multimodal.manifest import FEATURE
from stage03_engine.replay.replay import replay
from stagetrace import Event, read_run
from stagetrace.check.reasons import explain

PROMPTS = {
    "one, first": ("<image>What is this?", (1,)),
    "one, in between": ("Look at <image>, and say what it is", (1,)),
    "one, last": ("This is <image>", (2,)),
    "two": ("Here <image> and there <image>: compare", (1, 2)),
    "two, side by side": ("<image><image>Same?", (3, 4)),
    "the same twice": ("<image> again <image> yes", (5, 5)),
    "none": ("Only words, and no picture", ()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_folder(tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import LlavaForConditionalGeneration

    return LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    made = Engine(folder)
    yield made
    made.core.shutdown()


@pytest.fixture(scope="module")
def expected(folder: Path, reference: Any) -> dict[str, list[int]]:
    """What transformers answers to each of PROMPTS, with its own preparation of the pictures."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, use_fast=False)
    made, found = Engine(folder), {}
    for name, (text, numbers) in PROMPTS.items():
        request = made.request(text, numbers)
        given = {}
        if numbers:
            given["pixel_values"] = processor([picture(number) for number in numbers], return_tensors="pt").pixel_values
        ids = torch.tensor([request.prompt_token_ids])
        with torch.inference_mode():
            tokens = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, do_sample=False, eos_token_id=None, **given
            )[0]  # fmt: skip
        found[name] = tokens[len(request.prompt_token_ids) :].tolist()
    made.core.shutdown()
    return found


def test_answers_are_those_of_transformers(engine: Engine, expected: dict[str, list[int]]) -> None:
    assert {name: engine.answer(engine.request(*each))[0] for name, each in PROMPTS.items()} == expected


def test_the_pictures_matter(engine: Engine) -> None:
    """Or the tests above would show nothing."""
    text, (first, *_) = PROMPTS["one, first"]
    answers = [engine.answer(engine.request(text, [number]))[0] for number in range(first, first + 6)]
    assert len({tuple(answer) for answer in answers}) >= 5


def test_probabilities_of_the_prompt_are_those_of_transformers(engine: Engine, reference: Any, folder: Path) -> None:
    """Each place, of text and of pictures, not only the answer."""
    from transformers import AutoImageProcessor

    text, numbers = PROMPTS["two"]
    request = engine.request(text, numbers, prompt_logprobs=0, max_tokens=1)
    ids = torch.tensor([request.prompt_token_ids])
    pixels = AutoImageProcessor.from_pretrained(folder, use_fast=False)(
        [picture(number) for number in numbers], return_tensors="pt"
    ).pixel_values
    with torch.inference_mode():
        logits = reference(input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids)).logits[0]
    wanted = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    engine.core.add_request(request)
    outputs = []
    while engine.core.has_unfinished_requests:
        outputs += engine.core.step().outputs
    given = next(output.result["prompt_logprobs"] for output in outputs if output.result)
    assert torch.allclose(torch.tensor([entry.logprobs[0] for entry in given]), wanted, atol=2e-4)


ALL = SETTINGS | {"two pictures at a time": {"max_num_encoder_input_tokens": 2 * PLACES}}
FEW_BLOCKS = {"block_size": 4, "num_gpu_blocks_override": 23, "max_model_len": 88}


def test_blocks_of_pictures_travel_through_a_folder(
    folder: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """An engine that starts with what another one has left there: it encodes only what is not in whole blocks."""
    extra = {"shared_storage_path": str(tmp_path)}
    settings = {
        "kv_transfer_config": {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra},
        "prefix_caching_hash_seed": "seed",
        "block_size": 4,
    }
    encodes = []
    for _ in range(2):
        engine = Engine(folder, **settings)
        answers = engine.answer(*(engine.request(*each) for each in PROMPTS.values()))
        assert dict(zip(PROMPTS, answers, strict=True)) == expected
        encodes.append(engine.encodes())
        engine.core.shutdown()
    assert encodes[1] < encodes[0]


def test_random_weights_will_do(folder: Path) -> None:
    """`--load-format dummy`, of tower and projector too."""
    engine = Engine(folder, load_format="dummy")
    assert len(engine.answer(engine.request(*PROMPTS["two"]))[0]) == 8
    engine.core.shutdown()


@pytest.mark.slow(
    keep=("chunks of 5", "odd blocks", "preempted, one picture", "preempted, swapped", "preempted, ahead", "drafts")
)
@pytest.mark.parametrize("name", ALL)
def test_no_setting_changes_an_answer(name: str, folder: Path, expected: dict[str, list[int]]) -> None:
    preempts = name.startswith("preempted")
    settings = ALL[name] | (FEW_BLOCKS if preempts else {})
    same_answers(folder, PROMPTS, expected, settings, preempts, PLACES)


def test_a_chunk_may_end_within_a_picture(folder: Path, expected: dict[str, list[int]]) -> None:
    """And the picture is encoded once, in the step that reaches it."""
    engine = Engine(folder, max_num_batched_tokens=12, max_num_seqs=4)
    name = "one, in between"
    request = engine.request(*PROMPTS[name])
    begin = request.task.features[0].offset
    assert engine.answer(request) == [expected[name]]
    ends = list(itertools.accumulate(sum(output.num_scheduled_tokens.values()) for output in engine.decisions))
    assert any(begin < end < begin + PLACES for end in ends)
    encoding = [number for number, output in enumerate(engine.decisions) if WORK.of(output.extras) is not None]
    assert encoding == [next(number for number, end in enumerate(ends) if end > begin)]
    assert engine.encodes() == 1
    assert engine.core.scheduler.stats.counts == {"mm_cache_queries": 1, "mm_cache_hits": 0}


def test_the_same_picture_is_found_and_another_is_not(engine: Engine) -> None:
    """In the prefix cache: the blocks of a picture, and those after it. What stands before it is always found."""
    before, after = "x" * 20, "y" * 30  # a token each; blocks of 16
    cached = []
    for number in (1, 1, 2, 2):
        request = engine.request(f"{before}<image>{after}", [number], max_tokens=1)
        engine.core.add_request(request)
        (output,) = engine.core.step().outputs
        cached.append(output.num_cached_tokens)
    assert cached == [0, 64, 16, 64]  # of 66


def test_what_the_prefix_cache_has_is_not_encoded_again(engine: Engine) -> None:
    text = f"{'x' * 16}<image>{'y' * 20}"
    engine.answer(engine.request(text, [1]))
    assert engine.encodes() == 1
    for _ in range(2):
        engine.answer(engine.request(text, [1]))
    assert engine.encodes() == 1


def test_the_encoder_runs_once_for_a_picture_of_several_requests(engine: Engine) -> None:
    """They begin differently, so that the prefix cache has nothing."""
    engine.answer(*(engine.request(f"{word} <image> {word}", [1]) for word in ("dog", "cat", "man")))
    assert engine.encodes() == 1
    engine.answer(engine.request("later <image>", [1]))
    assert engine.encodes() == 1, "it was not kept"
    assert engine.core.scheduler.stats.counts == {"mm_cache_queries": 4, "mm_cache_hits": 3}


def test_new_weights_see_every_picture_again(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: tensor * 1.5 if "projector" in name else tensor for name, tensor in tensors.items()}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    answers, asked = list[list[list[int]]](), ("one, first", "two")
    for weights, settings in ((other, {}), (folder, {"enable_weight_updates": True})):
        engine = Engine(weights, **settings)
        answers.append(engine.answer(*(engine.request(*PROMPTS[name]) for name in asked)))
        if settings:
            engine.core.call("prepare_weights", str(other))
            engine.core.call("update_weights", str(other), 1)
            answers.append(engine.answer(*(engine.request(*PROMPTS[name]) for name in asked)))
        engine.core.shutdown()
    fresh, before, after = answers
    assert fresh != before, "the weights do not matter"
    assert after == fresh


def test_the_longest_unused_picture_makes_room(folder: Path) -> None:
    engine = Engine(folder, max_num_encoder_input_tokens=2 * PLACES)
    for number in (1, 2, 1, 3, 1):  # 3 takes the room of 2
        engine.answer(engine.request(f"{number} {len(engine.decisions)} <image>", [number]))
    assert engine.encodes() == 3
    assert len(engine.core.executor.worker.model_runner.hooks[0]._cache) == 2  # type: ignore[attr-defined]


def test_a_salt_keeps_pictures_apart(engine: Engine) -> None:
    """As it does blocks: whether somebody else has shown a picture cannot be found out."""
    for salt in ("mine", "yours", "mine"):
        request = engine.request("<image>", [1])
        request.cache_salt = salt
        engine.answer(request)
    assert engine.encodes() == 2


def test_aborted_requests_leave_nothing(engine: Engine) -> None:
    for text, numbers in PROMPTS.values():
        engine.core.add_request(engine.request(text, numbers, max_tokens=50))
    engine.core.step()
    engine.core.abort_requests(list(engine.core.scheduler.requests))
    engine.core.step()
    assert not engine.hook.cache.pinned and not engine.hook.spans
    engine.answer(engine.request("one more", []))
    runner_hook = next(hook for hook in engine.core.executor.worker.model_runner.hooks if hasattr(hook, "_features"))  # type: ignore[attr-defined]
    assert not runner_hook._features


def test_a_picture_that_is_computed_makes_room(folder: Path) -> None:
    """While its request goes on: another one need not wait for the end."""
    engine = Engine(folder, max_num_encoder_input_tokens=1)
    engine.core.add_request(engine.request("<image> first", [1], max_tokens=50))
    engine.core.step()
    assert not engine.hook.cache.pinned
    late = engine.request("<image> second", [2])
    engine.core.add_request(late)
    assert [output.request_id for output in engine.core.step().outputs][-1] == late.request_id


def test_a_request_that_is_preempted_within_a_picture(folder: Path, expected: dict[str, list[int]]) -> None:
    """Its picture makes room, and is there again when it goes on."""
    engine = Engine(
        folder, block_size=4, num_gpu_blocks_override=23, max_model_len=88, max_num_batched_tokens=6, max_num_seqs=4
    )
    long, seeing = engine.request("x" * 76, []), engine.request(*PROMPTS["one, first"])
    engine.core.add_request(long)
    while engine.core.scheduler.requests[long.request_id].num_tokens < 80:
        engine.core.step()
    engine.core.add_request(seeing)
    tokens, within = list[int](), False
    while engine.core.has_unfinished_requests:
        pinned = bool(engine.hook.cache.pinned)
        for output in engine.core.step().outputs:
            tokens += output.new_token_ids if output.request_id == seeing.request_id else []
        if engine.decisions[-1].preempted_req_ids == [seeing.request_id]:
            within = within or pinned
            assert not engine.hook.cache.pinned
    assert within and tokens == expected["one, first"]


def test_a_request_that_another_hook_refuses_leaves_nothing(engine: Engine) -> None:
    class Refuses(SchedulerHook):
        def added(self, request: Request) -> None:
            raise InvalidRequestError("No.")

    engine.core.scheduler.hooks.append(Refuses(engine.core.scheduler, engine.config))
    with pytest.raises(InvalidRequestError, match="No."):
        engine.core.add_request(engine.request("<image>", [1]))
    assert not engine.hook.spans and not engine.hook.cache.lengths


@pytest.mark.parametrize("text, pictures", [("no place", [1]), ("<image>", []), ("<image> <image>", [1])])
def test_a_place_for_each_picture_and_a_picture_for_each_place(engine: Engine, text: str, pictures: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="for each image"):
        engine.request(text, pictures)


def test_a_prompt_is_too_long_with_its_pictures(folder: Path) -> None:
    engine = Engine(folder, max_model_len=PLACES)
    with pytest.raises(InvalidRequestError, match=f"The prompt has {PLACES} tokens"):
        engine.request("<image>", [1])


def broken_offset(request: EngineCoreRequest) -> None:
    request.task.features[0].offset += 1


def broken_length(request: EngineCoreRequest) -> None:
    request.task.features[0].length -= 1


def broken_data(request: EngineCoreRequest) -> None:
    request.task.features[0].data = b"few"


def one_missing(request: EngineCoreRequest) -> None:
    del request.task.features[1]


def in_wrong_order(request: EngineCoreRequest) -> None:
    request.task.features.reverse()


@pytest.mark.parametrize("spoil", [broken_offset, broken_length, broken_data, one_missing, in_wrong_order])
def test_the_engine_trusts_no_message(engine: Engine, spoil: Any) -> None:
    request = engine.request("<image> and <image>", [1, 2])
    spoil(request)
    with pytest.raises(InvalidRequestError):
        engine.core.add_request(request)
    assert not engine.core.has_unfinished_requests
    assert len(engine.answer(engine.request("<image>", [1]))[0]) == 8


REFUSED: dict[str, dict[str, Any]] = {
    "several workers": {"tensor_parallel_size": 2},
    "several workers, in a row": {"pipeline_parallel_size": 2},
    "several workers, or one elsewhere": {"distributed_executor_backend": "mp"},
    "enable_lora": {"enable_lora": True},
    "a model or head that drafts": {"speculative_config": {"model": "gpt2-tiny-draft", "num_speculative_tokens": 2}},
    "quantization": {"quantization": "int8"},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_combined_says_why(what: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineArgs.from_kwargs(model=str(folder), **REFUSED[what])
    assert "\n" not in str(refusal.value)
    if what != "a model or head that drafts":  # the drafts have a refusal of their own before: other vocabularies
        assert f"{what.partition(',')[0]} cannot be combined with a model that sees: " in str(refusal.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"vision_feature_select_strategy": "full"},
        {"vision_feature_layer": -1},
        {"vision_feature_layer": 1},
        {"multimodal_projector_bias": False},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_settings_of_the_model_mean_what_they_do_in_transformers(changed: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, LlavaForConditionalGeneration

    folder = llava_folder(tmp_path / "model", **changed)
    engine = Engine(folder)
    request = engine.request(*PROMPTS["two"])
    assert sum(feature.length for feature in request.task.features) == 2 * (PLACES + ("full" in changed.values()))
    ids = torch.tensor([request.prompt_token_ids])
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(folder, use_fast=False)
    pixels = processor([picture(number) for number in PROMPTS["two"][1]], return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None, **pixels
        )  # fmt: skip
    assert engine.answer(request) == [tokens[0, ids.shape[1] :].tolist()]
    engine.core.shutdown()


def test_new_names_of_weights_are_known_too(folder: Path, expected: dict[str, list[int]], tmp_path: Path) -> None:
    """Newer checkpoints begin all names with `model.`, and the tower has one name more."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "new")
    weights = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head.", "lm_head.")
        .replace("multi_modal", "model.multi_modal")
        .replace("vision_tower.", "model.vision_tower.vision_model."): tensor
        for name, tensor in weights.items()
    }
    assert not renamed.keys() & weights.keys()
    save_file(renamed, tmp_path / "new/model.safetensors")
    engine = Engine(tmp_path / "new")
    assert engine.answer(engine.request(*PROMPTS["two"])) == [expected["two"]]
    engine.core.shutdown()


@pytest.mark.parametrize(
    "changed",
    [
        {"vision_feature_layer": [-2, -1]},
        {"vision_feature_layer": 9},
        {"vision_feature_select_strategy": "mean"},
        {"projector_hidden_act": "relu"},
        {"image_token_index": 10_000},
        {"image_token_index": None},
        {"text_config": {"model_type": "mistral"}},
        {"text_config": 3},
        {"vision_config": {"model_type": "siglip_vision_model"}},
    ],
    ids=str,
)
def test_models_that_are_refused(changed: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key, value in changed.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    for name in ("preprocessor_config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        EngineArgs.from_kwargs(model=str(tmp_path))


def test_settings_of_pictures_must_be_there(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"there is no preprocessor_config\.json"):
        EngineArgs.from_kwargs(model=str(tmp_path))


def test_a_model_that_sees_makes_no_vectors_of_texts(folder: Path) -> None:
    with pytest.raises(ConfigError, match="one model cannot do both"):
        EngineArgs.from_kwargs(model=str(folder), runner="pooling")


def test_the_budget_is_at_least_a_picture(folder: Path) -> None:
    def budget(**settings: Any) -> int:
        config: VllmConfig = EngineArgs.from_kwargs(model=str(folder), **settings)
        return config.encoder_budget

    assert budget() == 2048 and budget(max_num_batched_tokens=300) == 300
    assert budget(max_num_encoder_input_tokens=3) == PLACES and budget(max_num_encoder_input_tokens=100) == 100


def recorded(folder: Path, directory: Path, **settings: Any) -> list[Event]:
    """All prompts at once, twice, with room for one picture at a time; what was recorded."""

    def life() -> None:
        engine = Engine(folder, max_num_encoder_input_tokens=1, **settings)
        for _ in range(2):
            engine.answer(*(engine.request(*each) for each in PROMPTS.values()))
        engine.core.shutdown()

    return list(read_run(record(directory, life)).events)


@pytest.mark.parametrize(
    "more", [{}, {"max_num_batched_tokens": 11, "max_num_seqs": 8}, SETTINGS["preempted"]], ids=str
)
def test_a_recording_is_decided_again(more: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Without pictures, tokens and a model."""
    recorded(folder, tmp_path, **more)
    assert [(result.difference, result.requests) for result in replay(tmp_path)] == [(None, 2 * len(PROMPTS))]


def test_what_the_trace_shows(folder: Path, tmp_path: Path) -> None:
    events = recorded(folder, tmp_path, max_num_batched_tokens=19, max_num_seqs=8)
    found = {event.name for event in events}
    assert set(FEATURE.events) - {"mrope.positions"} <= found  # a Llama has none
    scheduled = [(event.req, event.step, event.args["image"]) for event in events if event.name == "encoder.scheduled"]
    assert scheduled == [
        (event.req, event.step, event.args["image"]) for event in events if event.name == "encoder.encoded"
    ]
    assert "hooks" in {event.args["rule"] for event in events if event.name == "sched.held_back"}
    held = next(event for event in events if event.name == "encoder.no_room")
    assert held.req is not None
    (text,) = (
        reason.text
        for step in explain(tmp_path, held.req)
        for reason in step.reasons
        if step.step == held.step and reason.text.startswith("For image")
    )
    assert "the encoder has no room beside 1 that are still needed" in text


@pytest.mark.parametrize("script", ["small_llava.py", "small_qwen2_vl.py"])
def test_a_reader_gets_a_model_that_sees_without_a_download(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the README says: the folder is one that the engine takes."""
    made = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", [script, str(made)])
    runpy.run_path(str(Path(__file__).parents[1] / "support" / script), run_name="__main__")
    assert EngineArgs.from_kwargs(model=str(made)).shape.image_token is not None
