"""Pictures in the prompts of callers in Python, against transformers on the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from PIL import Image
from small_llava import PLACES, encoded, llava_folder, picture, reference_tokens

from stage03_engine.arg_utils import AsyncEngineArgs
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.frontend.features.beam_search.beam_search import BeamSearchParams
from stage03_engine.llm import LLM
from stage03_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 100}
PROMPTS = {
    "one": ("Look at <image>, and say what it is", (1,)),
    "two": ("Here <image> and there <image>: compare", (2, 3)),
    "the same twice": ("<image> again <image> yes", (5, 5)),
    "none": ("Only words, and no picture", ()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_folder(tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return {
        name: reference_tokens(folder, text, [picture(number) for number in numbers], GREEDY.max_tokens or 0)
        for name, (text, numbers) in PROMPTS.items()
    }


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SMALL) as made:
        yield made


def seeing(text: str, *pictures: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}, **more}


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("form", ["text", "tokens"])
def test_pictures_in_a_batch(form: str, llm: LLM, expected: dict[str, list[int]]) -> None:
    """Each prompt has its own, and some have none."""
    prompts = [seeing(text, *(picture(number) for number in numbers)) for text, numbers in PROMPTS.values()]
    if form == "tokens":
        for prompt in prompts:
            prompt["prompt_token_ids"] = llm.tokenizer.encode(prompt.pop("prompt"), False)
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) == list(expected.values())
    for output, (text, numbers) in zip(outputs, PROMPTS.values()):
        assert len(output.prompt_token_ids or ()) == len(text.replace("<image>", "")) + PLACES * len(numbers)
        assert output.prompt == (text if form == "text" else None)


def test_one_picture_needs_no_list(llm: LLM, expected: dict[str, list[int]]) -> None:
    text, (number,) = PROMPTS["one"]
    data = {"image": picture(number)}
    assert tokens(llm.generate({"prompt": text, "multi_modal_data": data}, GREEDY)) == [expected["one"]]
    salted = {"prompt": text, "multi_modal_data": data, "cache_salt": "s"}
    assert tokens(llm.generate([salted, salted], GREEDY)) == [expected["one"]] * 2


@pytest.mark.parametrize("data", [{}, None, {"image": []}, {"image": ()}], ids=str)
def test_no_pictures_are_no_pictures(data: Any, llm: LLM, expected: dict[str, list[int]]) -> None:
    prompt = {"prompt": PROMPTS["none"][0], "multi_modal_data": data}
    assert tokens(llm.generate(prompt, GREEDY)) == [expected["none"]]


def test_another_picture_is_another_answer(expected: dict[str, list[int]], llm: LLM) -> None:
    assert tokens(llm.generate(seeing(PROMPTS["one"][0], picture(4)), GREEDY)) != [expected["one"]]


def test_several_answers_see_it_too(llm: LLM, expected: dict[str, list[int]]) -> None:
    """Each of them is a request of its own to the engine."""
    prompt = seeing(PROMPTS["one"][0], picture(1))
    drawn = SamplingParams(temperature=1e-3, seed=1, n=3, max_tokens=8, ignore_eos=True)
    [output] = llm.generate(prompt, drawn)
    assert [list(answer.token_ids) for answer in output.outputs] == [expected["one"]] * 3


def test_the_engine_in_its_own_process(folder: Path, expected: dict[str, list[int]]) -> None:
    with LLM(str(folder), multiprocess=True, **SMALL) as made:
        text, numbers = PROMPTS["two"]
        assert tokens(made.generate(seeing(text, *map(picture, numbers)), GREEDY)) == [expected["two"]]


def test_on_an_event_loop(folder: Path, expected: dict[str, list[int]]) -> None:
    async def run() -> list[int]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), **SMALL))
        try:
            text, numbers = PROMPTS["two"]
            prompt = seeing(text, *map(picture, numbers))
            outputs = [output async for output in engine.generate(prompt, GREEDY, "r0")]
            return list(outputs[-1].outputs[0].token_ids)
        finally:
            engine.shutdown()

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE)) == expected["two"]


def lost(tmp_path: Path) -> Image.Image:
    """A picture whose file is cut: Pillow finds out when its pixels are asked for."""
    path = tmp_path / "cut.png"
    path.write_bytes(encoded(picture(1, (200, 150)))[:300])
    return Image.open(path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too few places": (
        seeing("no place", picture(1)),
        "one <image> for each image: it has 0, and the request brings 1",
    ),
    "too many places": (
        seeing("<image> <image>", picture(1)),
        "one <image> for each image: it has 2, and the request brings 1",
    ),
    "no pictures for places": (
        {"prompt": "<image>", "multi_modal_data": {}},
        "one <image> for each image: it has 1, and the request brings 0",
    ),
    "a path": (seeing("<image>", "a.png"), "a picture is a PIL.Image.Image, not str"),
    "bytes": (seeing("<image>", b"abc"), "not bytes"),
    "None": (seeing("<image>", None), "not NoneType"),
    "sound": ({"prompt": "x", "multi_modal_data": {"audio": [1.0]}}, "it is {'image': picture}"),
    "a list": ({"prompt": "x", "multi_modal_data": [1]}, "it is {'image': picture}"),
    "no pixels": (seeing("<image>", Image.new("RGB", (0, 3))), "broken, or has no pixels"),
    "nothing to read": ({"multi_modal_data": {"image": [picture(1)]}}, "a prompt is a text"),
    "other keys": (seeing("<image>", picture(1), mm_processor_kwargs={}), "a prompt is a text"),
    "a salt that is none": (seeing("<image>", picture(1), cache_salt=3), "may hold a cache_salt"),
    "embeddings": ({"multi_modal_data": {"image": picture(1)}, "prompt_embeds": None}, "beside them|no tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str, llm: LLM) -> None:
    prompt, why = REFUSED[what]
    with pytest.raises(InvalidRequestError, match=why) as refused:
        llm.generate([{"prompt": "fine"}, prompt], GREEDY)
    assert "\n" not in str(refused.value)
    assert not llm.output_processor.request_states, "something runs"


def test_a_file_that_is_cut(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="a picture is broken"):
        llm.generate(seeing("<image>", lost(tmp_path)), GREEDY)


def test_only_generate_takes_them(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="only generate takes"):
        llm.beam_search([seeing("<image>", picture(1))], BeamSearchParams(beam_width=2, max_tokens=2))


def test_a_model_of_text_alone_says_so() -> None:
    with LLM("gpt2-tiny", prefault_kv_cache=False) as made:
        with pytest.raises(InvalidRequestError, match="this model takes text alone"):
            made.generate(seeing("What?", picture(1)), GREEDY)
        assert len(made.generate({"prompt": "What?", "multi_modal_data": None}, GREEDY)[0].outputs[0].token_ids) == 8
