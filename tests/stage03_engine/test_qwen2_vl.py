"""Qwen2-VL against transformers on the same random weights: pictures of any size, whose places have rows and columns."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from seeing_engine import LIMITS, SETTINGS, SeeingEngine, same_answers
from small_llava import encoded, llava_folder, picture
from small_qwen2_vl import MAX_PIXELS, MIN_PIXELS, SEEN, UNIT, Reference, qwen2_vl_folder
from toy_engine import record

from stage02_server.features.images.decode import prepared
from stage03_engine.arg_utils import EngineArgs
from stage03_engine.core.features.multimodal.messages import WORK
from stage03_engine.core.features.multimodal.mrope import grid_positions
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.messages import EngineCoreRequest
from stage03_engine.multimodal.qwen2_vl import MOST_LONGER
from stage03_engine.multimodal.registry import MULTIMODAL_REGISTRY, ProcessingInfo
from stage03_engine.params.multimodal import MultiModalFeature
from stage03_engine.replay.replay import replay
from stagetrace import read_run

SIZES = {
    "as it is": (40, 32), "smaller than a square": (3, 5), "one pixel": (1, 1), "too many pixels": (300, 211), "wide": (320, 9),
    "high": (9, 320), "as long as can be": (200, 1), "as high as can be": (2, 400), "the least": (16, 16), "the most": (64, 40),
}  # fmt: skip
PROMPTS: dict[str, tuple[str, tuple[Image.Image, ...]]] = {
    "none": ("Only words, and no picture", ()),
    "one, first": (f"{SEEN}What is this?", (picture(1),)),
    "one, in between": (f"Look at {SEEN}, and say what it is", (picture(1),)),
    "one, last": (f"This is {SEEN}", (picture(2, (30, 70)),)),
    "two sizes": (f"Here {SEEN} and there {SEEN}: compare", (picture(1), picture(2, (300, 211)))),
    "side by side": (f"{SEEN}{SEEN}Same?", (picture(3, (9, 100)), picture(4, (100, 9)))),
    "the same twice": (f"{SEEN} again {SEEN} yes", (picture(5), picture(5))),
    **{f"a size: {name}": (f"See {SEEN}.", (picture(6, size),)) for name, size in SIZES.items()},
}
SEVERAL = ("none", "one, in between", "one, last", "two sizes", "side by side", "the same twice")
MOST_PLACES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2_vl_folder(tmp_path_factory.mktemp("qwen2_vl") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture
def engine(folder: Path) -> Iterator[SeeingEngine]:
    made = SeeingEngine(folder)
    yield made
    made.core.shutdown()


@pytest.fixture(scope="module")
def info(folder: Path) -> ProcessingInfo:
    return MULTIMODAL_REGISTRY.info(EngineArgs.from_kwargs(model=str(folder)).shape)


@pytest.fixture(scope="module")
def expected(folder: Path, reference: Reference) -> dict[str, list[int]]:
    """What transformers answers to each of PROMPTS."""
    made = SeeingEngine(folder)
    requests = {name: made.request(*prompt) for name, prompt in PROMPTS.items()}
    made.core.shutdown()
    return {
        name: reference.tokens(list(request.prompt_token_ids), list(PROMPTS[name][1]), 8)
        for name, request in requests.items()
    }


# Answers


def test_answers_are_those_of_transformers(engine: SeeingEngine, expected: dict[str, list[int]]) -> None:
    assert {name: engine.answer(engine.request(*each))[0] for name, each in PROMPTS.items()} == expected


def test_probabilities_of_the_prompt_are_those_of_transformers(engine: SeeingEngine, reference: Reference) -> None:
    """Each place, of text and of pictures, not only the answer."""
    for name in ("two sizes", "side by side", "a size: as long as can be"):
        request = engine.request(*PROMPTS[name], prompt_logprobs=0, max_tokens=1)
        wanted = reference.logprobs(list(request.prompt_token_ids), list(PROMPTS[name][1]))
        engine.core.add_request(request)
        outputs = []
        while engine.core.has_unfinished_requests:
            outputs += engine.core.step().outputs
        given = next(output.result["prompt_logprobs"] for output in outputs if output.result)
        found = torch.tensor([entry.logprobs[0] for entry in given])
        assert torch.allclose(found, wanted, atol=2e-4), (name, (found - wanted).abs().max())


def test_rows_and_columns_matter(engine: SeeingEngine, folder: Path) -> None:
    """Or the tests above would show nothing: the model answers otherwise if a picture's places are numbered as a text's."""
    names = [name for name in PROMPTS if name != "none"]
    answers = [engine.answer(engine.request(*PROMPTS[name]))[0] for name in names]
    flat = SeeingEngine(folder)
    hook = next(hook for hook in flat.core.executor.worker.model_runner.hooks if hasattr(hook, "_positions"))  # type: ignore[attr-defined]
    flat.core.executor.worker.model_runner.hooks.remove(hook)  # type: ignore[attr-defined]
    others = [flat.answer(flat.request(*PROMPTS[name]))[0] for name in names]
    flat.core.shutdown()
    assert sum(one != other for one, other in zip(answers, others)) >= len(names) // 2


@pytest.mark.parametrize(
    "text, vision",
    [
        ({"tie_word_embeddings": True}, {}),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 0, 0]}}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 6]}}, {}),
        ({"num_key_value_heads": 2}, {"num_heads": 4}),
        ({}, {"depth": 1, "mlp_ratio": 3}),
        ({}, {"temporal_patch_size": 3}),
        ({"rms_norm_eps": 0.05}, {"embed_dim": 64}),
    ],
    ids=str,
)
def test_settings_of_the_model_mean_what_they_do_in_transformers(
    text: dict[str, Any], vision: dict[str, Any], tmp_path: Path
) -> None:
    folder = qwen2_vl_folder(tmp_path / "model", text, vision)
    if "temporal_patch_size" in vision:
        write_preprocessor(folder, **vision)
    engine = SeeingEngine(folder)
    request = engine.request(*PROMPTS["two sizes"])
    wanted = Reference(folder).tokens(list(request.prompt_token_ids), list(PROMPTS["two sizes"][1]), 8)
    assert engine.answer(request) == [wanted]
    engine.core.shutdown()


def test_a_published_folder(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    """Older than transformers 5: the language model's settings stand outside, M-RoPE is a type, and tensors have other names."""
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    vision = config["vision_config"]
    vision["model_type"] = "qwen2_vl"
    vision["in_chans"] = vision.pop("in_channels")
    del vision["rope_parameters"]
    (old / "config.json").write_text(json.dumps(text | config | {"model_type": "qwen2_vl"}))
    renamed = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert any(name.startswith("model.layers.") for name in renamed)
    save_file(renamed, old / "model.safetensors", metadata={"format": "pt"})
    engine = SeeingEngine(old)
    assert [engine.answer(engine.request(*PROMPTS[name]))[0] for name in SEVERAL] == [
        expected[name] for name in SEVERAL
    ]
    engine.core.shutdown()


def test_random_weights_will_do(folder: Path) -> None:
    engine = SeeingEngine(folder, load_format="dummy")
    assert len(engine.answer(engine.request(*PROMPTS["two sizes"]))[0]) == 8
    engine.core.shutdown()


FEW_BLOCKS = {"block_size": 4, "num_gpu_blocks_override": 36, "max_model_len": 140}


@pytest.mark.slow(
    keep=("chunks of 5", "odd blocks", "preempted, one picture", "preempted, swapped", "preempted, ahead", "drafts")
)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_changes_an_answer(name: str, folder: Path, expected: dict[str, list[int]]) -> None:
    preempts = name.startswith("preempted")
    settings = SETTINGS[name] | (FEW_BLOCKS if preempts else {})
    same_answers(folder, {name: PROMPTS[name] for name in SEVERAL}, expected, settings, preempts, 1)


def test_recorded_steps_serve_what_follows_a_picture(folder: Path, expected: dict[str, list[int]]) -> None:
    """One number for each token is enough there; a step with places of a picture is not recorded."""
    engine = SeeingEngine(folder, attention_backend="native")
    hook = next(hook for hook in engine.core.executor.worker.model_runner.hooks if hasattr(hook, "graphs"))  # type: ignore[attr-defined]
    assert hook.graphs is not None
    dims, replay = list[int](), hook.graphs.forward
    hook.graphs.forward = lambda ids, at, metadata: dims.append(at.dim()) or replay(ids, at, metadata)  # type: ignore[func-returns-value]
    assert engine.answer(engine.request(*PROMPTS["one, in between"])) == [expected["one, in between"]]
    assert dims == [1] * 7
    engine.core.shutdown()
    engine = SeeingEngine(folder, attention_backend="native", max_num_batched_tokens=5, max_num_seqs=5)
    hook = next(hook for hook in engine.core.executor.worker.model_runner.hooks if hasattr(hook, "graphs"))  # type: ignore[attr-defined]
    replay, dims[:] = hook.graphs.forward, []
    hook.graphs.forward = lambda ids, at, metadata: dims.append(at.dim()) or replay(ids, at, metadata)  # type: ignore[func-returns-value]
    assert engine.answer(engine.request(*PROMPTS["one, in between"])) == [expected["one, in between"]]
    assert len(dims) > 7 + 1 and set(dims) == {1}, "the text around the picture is a text"
    engine.core.shutdown()


def test_requests_that_have_gone_leave_nothing(engine: SeeingEngine) -> None:
    hook = next(hook for hook in engine.core.executor.worker.model_runner.hooks if hasattr(hook, "_positions"))  # type: ignore[attr-defined]
    engine.answer(engine.request(*PROMPTS["one, first"]))
    for name in SEVERAL:
        engine.core.add_request(engine.request(*PROMPTS[name], max_tokens=50))
    engine.core.step()
    assert len(hook._positions) == len(SEVERAL) - 1
    engine.core.abort_requests(list(engine.core.scheduler.requests))
    engine.answer(engine.request(*PROMPTS["none"]))
    assert not hook._positions


def test_a_chunk_may_end_within_a_picture(folder: Path, expected: dict[str, list[int]]) -> None:
    """And the picture is encoded once, in the step that reaches it."""
    engine = SeeingEngine(folder, max_num_batched_tokens=12, max_num_seqs=4)
    request = engine.request(*PROMPTS["one, in between"])
    begin, length = request.task.features[0].offset, request.task.features[0].length
    assert engine.answer(request) == [expected["one, in between"]]
    ends = list(itertools.accumulate(sum(output.num_scheduled_tokens.values()) for output in engine.decisions))
    assert any(begin < end < begin + length for end in ends)
    assert engine.encodes() == 1


def test_the_budget_counts_the_places_of_each_picture(folder: Path) -> None:
    """A large one is encoded alone, some small ones together."""
    engine = SeeingEngine(folder, max_num_encoder_input_tokens=1)
    assert engine.config.encoder_budget == MULTIMODAL_REGISTRY.info(engine.config.shape).most_tokens < 4 * MOST_PLACES
    engine.core.shutdown()
    encoded_in_step = []
    for size in (SIZES["the least"], SIZES["the most"]):
        engine = SeeingEngine(folder, max_num_encoder_input_tokens=2 * MOST_PLACES)
        budget = engine.config.encoder_budget
        requests = [engine.request(f"{number} {SEEN}", [picture(number, size)]) for number in range(7)]
        for request in requests:
            engine.core.add_request(request)
        engine.core.step()
        work = WORK.of(engine.decisions[0].extras)
        assert work is not None
        places = sum(request.task.features[0].length for request in requests[: len(work.encode)])
        assert places <= budget and (len(work.encode) == 7 or places + requests[0].task.features[0].length > budget)
        encoded_in_step.append(len(work.encode))
        engine.core.abort_requests(list(engine.core.scheduler.requests))
        engine.core.shutdown()
    assert encoded_in_step == [7, budget // MOST_PLACES]


# What is the same picture


def test_the_same_text_with_other_pictures(engine: SeeingEngine, reference: Reference) -> None:
    """Found in the prefix cache is what stands before the picture, and all of it if it is the same."""
    before, cached = "x" * 20, []
    for shown in (picture(1), picture(1), picture(2), picture(1, (32, 40))):
        request = engine.request(f"{before}{SEEN}{'y' * 30}", [shown], max_tokens=8)
        engine.core.add_request(request)
        outputs = []
        while engine.core.has_unfinished_requests:
            outputs += engine.core.step().outputs
        cached.append(outputs[0].num_cached_tokens)
        tokens = [token for output in outputs for token in output.new_token_ids]
        assert tokens == reference.tokens(list(request.prompt_token_ids), [shown], 8)
    assert cached == [0, 64, 16, 16]  # of 72


def test_a_picture_that_lies_is_not_the_one_that_stands(engine: SeeingEngine, reference: Reference) -> None:
    """All white, they have the same bytes and take equally many places."""
    text, answers = f"See {SEEN} and say", []
    for size in ((16, 64), (64, 16)):
        shown = Image.new("RGB", size, (255, 255, 255))
        request = engine.request(text, [shown])
        assert request.task.features[0].length == 16
        answers.append(engine.answer(request)[0])
        assert answers[-1] == reference.tokens(list(request.prompt_token_ids), [shown], 8)
    assert engine.encodes() == 2 and answers[0] != answers[1]


def test_texts_and_pictures_in_one_batch_keep_their_positions(engine: SeeingEngine, reference: Reference) -> None:
    """A text that runs when a picture comes, and goes on when the picture has gone."""
    text = engine.request("A text that goes on for long", [], max_tokens=20)
    wanted = reference.tokens(list(text.prompt_token_ids), [], 20)
    engine.core.add_request(text)
    tokens: dict[str, list[int]] = {}
    for number in range(3):
        seeing = engine.request(*PROMPTS["two sizes"], max_tokens=2 + number)
        engine.core.add_request(seeing)
        for _ in range(4):
            for output in engine.core.step().outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    while engine.core.has_unfinished_requests:
        for output in engine.core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert tokens[text.request_id] == wanted


def test_blocks_of_pictures_travel_through_a_folder(
    folder: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Keys were turned by rows and columns where they were computed; who reads them goes on at the right number."""
    extra = {"shared_storage_path": str(tmp_path)}
    settings = {
        "kv_transfer_config": {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra},
        "prefix_caching_hash_seed": "seed",
        "block_size": 4,
    }
    encodes = []
    for _ in range(2):
        engine = SeeingEngine(folder, **settings)
        answers = engine.answer(*(engine.request(*PROMPTS[name]) for name in SEVERAL))
        assert answers == [expected[name] for name in SEVERAL]
        encodes.append(engine.encodes())
        engine.core.shutdown()
    assert encodes[1] < encodes[0]


def test_embeddings_beside_pictures(folder: Path) -> None:
    """Prompts that are embeddings are found by their places, not by positions."""
    from stage03_engine.llm import LLM
    from stage03_engine.sampling_params import SamplingParams

    rows = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    shown = {"prompt": PROMPTS["two sizes"][0], "multi_modal_data": {"image": list(PROMPTS["two sizes"][1])}}
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    chunks = {"max_num_batched_tokens": 12, "max_num_seqs": 3, "long_prefill_token_threshold": 4}
    with LLM(str(folder), enable_prompt_embeds=True, num_gpu_blocks_override=100, **chunks) as llm:
        alone = [llm.generate(prompt, greedy)[0].outputs[0].token_ids for prompt in ({"prompt_embeds": rows}, shown)]
        together = [
            output.outputs[0].token_ids for output in llm.generate([shown, {"prompt_embeds": rows + 0}], greedy)
        ]
    assert together == alone[::-1]


def test_a_replay_decides_the_same(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def asked() -> None:
        engine = SeeingEngine(folder, max_num_batched_tokens=16, max_num_seqs=4, max_num_encoder_input_tokens=1)
        engine.answer(*(engine.request(*PROMPTS[name]) for name in SEVERAL))
        engine.core.shutdown()

    record(run, asked)
    assert [(result.difference, result.requests) for result in replay(run)] == [(None, len(SEVERAL))]


def test_the_trace_says_how_far_pictures_shift_what_follows(folder: Path, tmp_path: Path) -> None:
    asked = list[EngineCoreRequest]()

    def run() -> None:
        engine = SeeingEngine(folder)
        asked.extend(engine.request(*PROMPTS[name]) for name in ("none", "two sizes"))
        engine.answer(*asked)
        engine.core.shutdown()

    record(tmp_path, run)
    [event] = [event for event in read_run(tmp_path).events if event.name == "mrope.positions"]
    first, second = asked[1].task.features
    longest = [max(each.width, each.height) // UNIT for each in (first, second)]
    saved = sum(longest) - first.length - second.length
    assert event.req == asked[1].request_id
    assert event.args == {"places": second.offset + second.length, "delta": saved}


# Positions


def feature(offset: int, rows: int, columns: int) -> MultiModalFeature:
    return MultiModalFeature("", offset, rows * columns, b"", columns * UNIT, rows * UNIT)


@given(st.data())
def test_positions_are_those_of_transformers(reference: Reference, data: st.DataObject) -> None:
    """Whatever stands where, and in whatever pieces they are asked for."""
    place, features = 0, []
    for _ in range(data.draw(st.integers(1, 3))):
        place += data.draw(st.integers(1, 6))  # transformers takes two pictures without a token between for one
        features.append(feature(place, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))))
        place += features[-1].length
    length = place + data.draw(st.integers(0, 5))
    kinds = torch.zeros(1, length, dtype=torch.int)
    for each in features:
        kinds[0, each.offset : each.offset + each.length] = 1
    grids = torch.tensor([[1, each.height // UNIT * 2, each.width // UNIT * 2] for each in features])
    wanted, delta = reference.model.model.get_rope_index(torch.zeros(1, length, dtype=torch.long), kinds, grids)
    positions = grid_positions(features, UNIT)
    assert positions.delta == int(delta)
    begin = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(begin + 1, length))
    found = torch.from_numpy(positions.between(begin, end))
    found = found if found.dim() == 2 else found[:, None].expand(-1, 3)
    assert torch.equal(found, wanted[:, 0, begin:end].T)


# Sizes


SIDES = st.integers(1, 700)


@given(SIDES, SIDES, st.integers(1, 60), st.integers(1, 60))
def test_sizes_are_those_of_transformers(folder_shape: Any, width: int, height: int, least: int, more: int) -> None:
    from dataclasses import replace

    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    shape, bounds = folder_shape, (least * 50, (least + more) * 50 + UNIT**2)
    processor = replace(shape.qwen2_vision.processor, min_pixels=bounds[0], max_pixels=bounds[1])
    info = MULTIMODAL_REGISTRY.info(replace(shape, qwen2_vision=replace(shape.qwen2_vision, processor=processor)))
    if max(width, height) > MOST_LONGER * min(width, height):
        with pytest.raises(ValueError, match="absolute aspect ratio"):
            smart_resize(height, width, UNIT, *bounds)
        with pytest.raises(ValueError, match="is more than 200 times as long as it is wide"):
            info.resized_size(width, height)
        return
    found = info.resized_size(width, height)
    assert found[::-1] == smart_resize(height, width, UNIT, *bounds)
    assert 1 <= info.num_tokens(*found) == found[0] * found[1] // UNIT**2 <= info.most_tokens
    assert found[0] * found[1] * 3 >= info.least_bytes


@pytest.fixture(scope="module")
def folder_shape(folder: Path) -> Any:
    return EngineArgs.from_kwargs(model=str(folder)).shape


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pixels_are_those_of_transformers(
    form: str, size: tuple[int, int], info: ProcessingInfo, folder_shape: Any, reference: Reference
) -> None:
    """To the bit: both resize with Pillow."""
    from io import BytesIO

    from stage03_engine.core.features.multimodal.pixels import normalised
    from stage03_engine.core.features.multimodal.qwen2_vision import in_units

    file = encoded(picture(3, size), form)
    seen = prepared(file, *LIMITS, info)
    assert (seen.file_width, seen.file_height) == size
    shown = MultiModalFeature("", 0, 0, seen.data, seen.width, seen.height)
    vision = folder_shape.qwen2_vision
    ours = in_units(normalised(shown, vision.processor.values, torch.empty(0)), vision)
    theirs = reference.processor([Image.open(BytesIO(file)).convert("RGB")], return_tensors="pt")
    assert theirs.image_grid_thw.tolist() == [[1, seen.height // (UNIT // 2), seen.width // (UNIT // 2)]]
    patches = theirs.pixel_values.view(len(ours), 3, 2, UNIT // 2, UNIT // 2)
    assert torch.equal(patches[:, :, 0], patches[:, :, 1])
    assert torch.allclose(ours, patches[:, :, 0], atol=1e-6)


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (2, 401), (3000, 10)], ids=str)
def test_a_picture_too_long_and_thin_is_refused(size: tuple[int, int], info: ProcessingInfo) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        prepared(encoded(Image.new("RGB", size)), *LIMITS, info)
    what = f"of {size[0]} x {size[1]} pixels is more than 200 times as long as it is wide"
    assert str(refusal.value) == f"image_url: the image {what}."


def test_a_picture_of_more_tokens_than_the_context_is_refused_by_its_head(info: ProcessingInfo) -> None:
    """Before it is decoded: the rest of the file need not even be there."""
    whole = encoded(picture(1, (64, 40)))
    with pytest.raises(InvalidRequestError, match="of 64 x 40 pixels takes 40 tokens of the prompt; at most 39"):
        prepared(whole[:60], 1 << 20, 1 << 20, 39, info)
    assert prepared(whole, 1 << 20, 1 << 20, 40, info).width == 64


# What is refused


def write_preprocessor(folder: Path, **changed: Any) -> None:
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def bounds_of(folder: Path, **settings: Any) -> tuple[int, int]:
    vision: Any = EngineArgs.from_kwargs(model=str(folder), **settings).shape.qwen2_vision
    return vision.processor.min_pixels, vision.processor.max_pixels


def test_who_says_how_large_pictures_are(folder: Path, tmp_path: Path) -> None:
    """As in transformers the two keys come before `size`; and the operator before all."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    assert bounds_of(other) == (MIN_PIXELS, MAX_PIXELS)
    size = {"shortest_edge": 100, "longest_edge": 10_000}
    write_preprocessor(other, size=size)
    assert bounds_of(other) == (MIN_PIXELS, MAX_PIXELS)
    write_preprocessor(other, min_pixels=None, max_pixels=None)
    assert bounds_of(other) == (100, 10_000)
    assert bounds_of(other, mm_processor_kwargs={"max_pixels": 5000}) == (100, 5000)
    assert bounds_of(other, mm_processor_kwargs={"min_pixels": 200, "max_pixels": 5000}) == (200, 5000)
    write_preprocessor(other, size=None)
    assert bounds_of(other) == (56 * 56, 28 * 28 * 1280)


def test_the_operator_makes_pictures_smaller(folder: Path) -> None:
    engine = SeeingEngine(folder, mm_processor_kwargs={"max_pixels": 6 * UNIT**2})
    request = engine.request(*PROMPTS["two sizes"])
    assert [each.length for each in request.task.features] == [4, 4]
    own = Reference(folder)
    own.processor.size["longest_edge"] = 6 * UNIT**2
    assert engine.answer(request) == [own.tokens(list(request.prompt_token_ids), list(PROMPTS["two sizes"][1]), 8)]
    engine.core.shutdown()


BAD_KWARGS: dict[str, dict[str, Any]] = {
    "an unknown key": {"do_resize": False},
    "a text": {"max_pixels": "100"},
    "a truth": {"max_pixels": True},
    "nothing": {"max_pixels": 0},
    "less than a unit": {"min_pixels": 1, "max_pixels": UNIT**2 - 1},
    "less than the least": {"min_pixels": 1000, "max_pixels": 999},
    "more than anybody has": {"max_pixels": 1 << 29},
}


@pytest.mark.parametrize("kwargs", BAD_KWARGS.values(), ids=BAD_KWARGS)
def test_processor_kwargs_that_are_refused(kwargs: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ConfigError, match="^mm_processor_kwargs") as refusal:
        EngineArgs.from_kwargs(model=str(folder), mm_processor_kwargs=kwargs)
    assert "\n" not in str(refusal.value)


def test_processor_kwargs_are_for_pictures_that_keep_their_size(tmp_path: Path) -> None:
    for model in ("gpt2-tiny", str(llava_folder(tmp_path / "llava"))):
        with pytest.raises(ConfigError, match="mm_processor_kwargs is for Qwen2-VL"):
            EngineArgs.from_kwargs(model=model, mm_processor_kwargs={"max_pixels": 5000})


@pytest.mark.parametrize(
    "file, changed",
    [
        ("preprocessor_config.json", {"patch_size": 7}),
        ("preprocessor_config.json", {"merge_size": 1}),
        ("preprocessor_config.json", {"temporal_patch_size": 1}),
        ("preprocessor_config.json", {"do_resize": False}),
        ("preprocessor_config.json", {"min_pixels": 5000}),
        ("preprocessor_config.json", {"max_pixels": 2.5}),
        ("preprocessor_config.json", {"image_std": [1, 0, 1]}),
        ("config.json", {"image_token_id": "x"}),
        ("config.json", {"vision_config": {"hidden_size": 32, "hidden_act": "relu"}}),
        ("config.json", {"vision_config": {"hidden_size": 33}}),
        ("config.json", {"vision_config": {"hidden_size": 32, "embed_dim": 36, "num_heads": 3}}),
        ("config.json", {"vision_config": {"hidden_size": 32, "mlp_ratio": "2"}}),
        ("config.json", {"vision_config": {"hidden_size": 32, "rope_parameters": {"rope_type": "yarn"}}}),
        ("config.json", {"vision_config": []}),
        ("config.json", {"vision_config": [1]}),
    ],
    ids=str,
)
def test_files_that_are_refused(file: str, changed: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    path = other / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ConfigError, match=r"config\.json: ") as refusal:
        EngineArgs.from_kwargs(model=str(other))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("section", [[2, 3], [2, 3, 4], [1, 1, 1, 5], ["a", 1, 1], [-1, 4, 5], 8, None], ids=str)
def test_sections_that_are_refused(section: Any, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = section
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="mrope_section"):
        EngineArgs.from_kwargs(model=str(other))


def broken_offset(request: EngineCoreRequest) -> None:
    request.task.features[0].offset += 1


def no_whole_units(request: EngineCoreRequest) -> None:
    shown = request.task.features[0]
    shown.width, shown.height = shown.width // 2, shown.height * 2  # 20 x 64: as many bytes


def no_size(request: EngineCoreRequest) -> None:
    shown = request.task.features[0]
    shown.width = shown.length = 0
    shown.data = b""


def few_bytes(request: EngineCoreRequest) -> None:
    request.task.features[0].data = b"few"


def one_missing(request: EngineCoreRequest) -> None:
    del request.task.features[1]


@pytest.mark.parametrize("spoil", [broken_offset, no_whole_units, no_size, few_bytes, one_missing])
def test_the_engine_trusts_no_message(engine: SeeingEngine, spoil: Any) -> None:
    request = engine.request(f"{SEEN} and {SEEN}", [picture(1), picture(2, (64, 40))])
    spoil(request)
    with pytest.raises(InvalidRequestError):
        engine.core.add_request(request)
    assert not engine.core.has_unfinished_requests
    assert len(engine.answer(engine.request(*PROMPTS["one, first"]))[0]) == 8


@pytest.mark.parametrize("shown", [[picture(1)], [picture(1)] * 2], ids=len)
def test_a_place_for_each_picture(shown: Sequence[Image.Image], engine: SeeingEngine) -> None:
    with pytest.raises(InvalidRequestError, match="for each image"):
        engine.request(f"{SEEN}{SEEN}{SEEN}", shown)
    with pytest.raises(InvalidRequestError, match="for each image"):
        engine.request("<|image_pad|> and no picture", [])
