"""Every field that says something about an adapter, with values of every kind of JSON: those of a wrong kind are refused in a line that names it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from stage03_engine.core.features.lora.config_file import FIELDS, NEEDED, NOT_BUILT, parse_config
from stage03_engine.core.features.lora.manifest import folders_of
from stage03_engine.errors import ConfigError, InvalidRequestError
from stage03_engine.frontend.features.call_forms.call_forms import LoRARequest
from stage03_engine.llm import LLM
from stage03_engine.model_path import BUNDLED_FOLDER
from stage03_engine.sampling_params import SamplingParams

SHIP = str(BUNDLED_FOLDER / "gpt2-tiny-ship")
WHOLE = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
VALUES: dict[str, list[Any]] = {
    "null": [None], "flag": [True, False], "whole": [1, 7, 0, -1], "number": [0.5, 8.0], "text": ["no", "7", "", "true"], "list": [[]],
    "texts": [["a"]], "wholes": [[1]], "mixed": [["a", 1], [True], [None], [[]]], "object": [{}, {"a": 1}],
}  # fmt: skip
"""Kinds of JSON -> values. A list of anything is one of the last three, too."""
OF_WORDS: dict[str, set[str]] = {
    "true or false": {"flag"}, "a text": {"text"}, "an object": {"object"}, "a number": {"whole", "number"}, "a list of texts": {"list", "texts"},
    "a text or a list of texts": {"text", "list", "texts"}, "an integer or a list of integers": {"whole", "list", "wholes"},
    "an integer of at least 1": {"whole"}, "a number between -1000000 and 1000000": {"whole", "number"}, "true, false or a text": {"flag", "text"},
    "a list": {"list", "texts", "wholes", "mixed"}, "a list of integers": {"list", "wholes"},
    "an object or a list of integers": {"object", "list", "wholes"},
}  # fmt: skip
"""What a refusal says that a field must be -> the kinds that it may have."""


def config_with(field: str, value: Any) -> bytes:
    return json.dumps(WHOLE | {field: value}).encode()


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_adapter_config_json(field: str) -> None:
    may = OF_WORDS[FIELDS[field].words] | (set() if field in NEEDED else {"null"})
    for kind, values in VALUES.items():
        for value in values:
            try:
                parse_config(config_with(field, value))
            except ConfigError as error:
                said = str(error)
                assert said.startswith(field) or field == "peft_type", said
                assert "\n" not in said
                refused_as_kind = " must be " in said and field != "peft_type"
                assert refused_as_kind == (kind not in may or (field == "r" and value < 1)) or field == "peft_type", (
                    field,
                    value,
                    said,
                )
            else:
                assert kind in may, (field, value)


def test_what_training_wrote_is_read() -> None:
    """The fields of PEFT's own files are known, with the kinds that they have there."""
    own = json.loads((Path(SHIP) / "adapter_config.json").read_text())
    assert own.keys() <= FIELDS.keys() and parse_config(json.dumps(own).encode()) == own
    assert set(NOT_BUILT) <= FIELDS.keys()


@pytest.mark.parametrize("field", NOT_BUILT)
def test_what_changes_the_product_and_is_not_built_is_named(field: str) -> None:
    wrong = next(value for value in itertools.chain(*VALUES.values()) if value and FIELDS[field].fits(value))
    with pytest.raises(ConfigError, match=f"^{field} .* is not built$"):
        parse_config(config_with(field, wrong))


@pytest.mark.parametrize("field", ["name", "path", "base_model_name"])
def test_the_json_form_of_lora_modules(field: str) -> None:
    whole = {"name": "ship", "path": SHIP, "base_model_name": "gpt2-tiny"}
    assert folders_of((json.dumps(whole),)) == {"ship": SHIP}
    for kind, values in VALUES.items():
        for value in values:
            given = json.dumps(whole | {field: value})
            if (kind == "text" and value) or (field == "base_model_name" and kind in ("null", "text")):
                folders_of((given,))
                continue
            with pytest.raises(
                ConfigError, match=f"^lora_modules: ({field} must be a text, not|.* is not name=folder)"
            ) as raised:
                folders_of((given,))
            assert "\n" not in str(raised.value) and (kind == "text" or field in str(raised.value).partition(", in")[0])


def test_fields_that_are_left_out_or_never_end() -> None:
    for given in ('{"name": "a"}', '{"path": "b"}', "{}", "{" + '"a":{' * 100_000, '{"name": ' + "9" * 5000 + "}"):
        with pytest.raises(ConfigError, match="^lora_modules: ") as raised:
            folders_of((given,))
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM("gpt2-tiny", enable_lora=True, max_model_len=64, kv_cache_memory_bytes=20_000_000, device="cpu") as llm:
        yield llm


GOOD: dict[str, Any] = {"lora_name": "ship", "lora_int_id": 0, "lora_path": SHIP}
KIND_OF = {"lora_name": str, "lora_int_id": int, "lora_path": str}


@pytest.mark.parametrize("field", GOOD)
def test_every_field_of_a_lora_request(field: str, llm: LLM) -> None:
    """Also of one that is there already: `lora_int_id=True` would find number 1."""
    params = SamplingParams(max_tokens=1)
    llm.generate("a", params, lora_request=LoRARequest(**GOOD))
    wrong = [value for value in itertools.chain(*VALUES.values()) if type(value) is not KIND_OF[field]]
    for value in [*wrong, b"ship", Path(SHIP)]:
        for name in ("ship", "new"):
            with pytest.raises(InvalidRequestError, match=f"^{field} must be ") as raised:
                llm.generate("a", params, lora_request=LoRARequest(**GOOD | {"lora_name": name} | {field: value}))
            assert raised.value.param == field and "\n" not in str(raised.value)
    for wrong_request in ("ship", 1, {"lora_name": "ship"}):
        with pytest.raises(InvalidRequestError, match="^lora_name must be a text, not None"):
            llm.generate("a", params, lora_request=wrong_request)
    assert llm.call("list_loras") == [1]


def test_the_adapter_of_sampling_params(llm: LLM) -> None:
    for value in itertools.chain(*VALUES.values(), [b"x"]):
        if value is not None and not isinstance(value, str):
            with pytest.raises(InvalidRequestError, match="^lora must be a text, not "):
                llm.generate("a", SamplingParams(max_tokens=1, lora=value))


def test_the_calls_of_the_engine_core(llm: LLM) -> None:
    """Whoever calls them: numbers are integers, and no flags."""
    llm.generate("a", SamplingParams(max_tokens=1), lora_request=LoRARequest(**GOOD))
    for value in itertools.chain(*VALUES.values()):
        if type(value) is not int:
            for method in ("remove_lora", "pin_lora"):
                with pytest.raises(InvalidRequestError, match="^lora_int_id must be an integer"):
                    llm.call(method, value)
            with pytest.raises(InvalidRequestError, match="^lora_int_id must be an integer"):
                llm.call("add_lora", "x", value, SHIP)
        if type(value) is not str:
            for args, field in (((value, 9, SHIP), "lora_name"), (("x", 9, value), "lora_path")):
                with pytest.raises(InvalidRequestError, match=f"^{field} must be a text"):
                    llm.call("add_lora", *args)
    assert llm.call("list_loras") == [1]


def test_numbers_that_no_message_can_hold(llm: LLM) -> None:
    for number in (-1, 1 << 63, 1 << 70):
        with pytest.raises(InvalidRequestError, match="^lora_int_id"):
            llm.generate("a", SamplingParams(max_tokens=1), lora_request=LoRARequest("new", number, SHIP))
    with pytest.raises(InvalidRequestError, match="^lora_int_id"):
        llm.call("add_lora", "x", 0, SHIP)
