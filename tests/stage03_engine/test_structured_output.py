"""Structured output through the whole engine: what is promised to match does, and nobody else notices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import regex
from hypothesis import given, settings, strategies as st

from stage03_engine.core.features.debug.scheduler_checks import check_invariants
from stage03_engine.core.features.structured_output.manager import Accepted
from stage03_engine.core.features.structured_output.scheduler_hook import GrammarSchedulerHook
from stage03_engine.errors import InvalidRequestError
from stage03_engine.llm import LLM
from stage03_engine.params.structured_outputs import StructuredOutputsParams as Wanted
from stage03_engine.sampling_params import RequestOutputKind, SamplingParams
from stagetrace import read_run

SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 50_000_000, "max_model_len": 256}
PROMPT = "ROMEO:"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("gpt2-tiny", disable_any_whitespace=True, **SMALL) as llm:
        yield llm


def params(wanted: Wanted | None, seed: int = 0, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 150, "seed": seed, "structured_outputs": wanted} | more)


# Naive meanings, to judge by


def valid(value: Any, schema: Any, root: Any) -> bool:
    """Does a value follow a schema of the kind that the strategy below draws?"""
    if schema is True:
        return True
    if "$ref" in schema:
        return valid(value, root["$defs"]["node"], root)
    if "anyOf" in schema:
        return any(valid(value, option, root) for option in schema["anyOf"])
    if "enum" in schema:
        return any(value == v and type(value) is type(v) for v in schema["enum"])
    kind = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}.get(
        type(value), "null"
    )
    if schema["type"] != kind and (schema["type"], kind) != ("number", "integer"):
        return False
    if kind == "object":
        known = schema["properties"]
        return all(k in known and valid(v, known[k], root) for k, v in value.items()) and set(
            schema["required"]
        ) <= set(value)
    if kind == "array":
        in_bounds = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99)
        return in_bounds and all(valid(item, schema["items"], root) for item in value)
    if kind == "string":
        fits = "pattern" not in schema or re.fullmatch(schema["pattern"], value) is not None
        return fits and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 999)
    if kind in ("integer", "number"):
        return schema.get("minimum", -1e99) <= value <= schema.get("maximum", 1e99)
    return True


leaves = st.one_of(
    st.builds(lambda low, n: {"type": "string", "minLength": low, "maxLength": low + n}, st.integers(0, 3), st.integers(0, 9)),
    st.sampled_from(["[a-c]{2,4}", "x|y+z", "[^a]{3}", r"\d\d-\w"]).map(lambda p: {"type": "string", "pattern": p}),
    st.builds(lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, st.integers(-300, 300), st.integers(0, 500)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number", "minimum": 0, "maximum": 5}]),
    st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=4), st.none(), st.booleans()), min_size=1, max_size=4).map(lambda v: {"enum": v}),
)  # fmt: skip
NAMES = ["a", "b", 'q"', "é", "long name"]


def objects(inner: st.SearchStrategy) -> st.SearchStrategy:
    made = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    return made.flatmap(
        lambda p: st.sets(st.sampled_from(sorted(p)) if p else st.nothing()).map(
            lambda r: {"type": "object", "properties": p, "required": sorted(r)}
        )
    )


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda s, low: {"type": "array", "items": s, "minItems": low, "maxItems": low + 2}, inner, st.integers(0, 2)),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=settings().max_examples // 6)
@given(st.lists(schemas, min_size=3, max_size=3), st.integers(0, 1000))
def test_json_follows_its_schema(llm: LLM, drawn: list[Any], seed: int) -> None:
    node = {
        "type": "object",
        "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["v"],
    }
    drawn = [*drawn, {"anyOf": [{"$ref": "#/$defs/node"}], "$defs": {"node": node}}]
    outputs = llm.generate([PROMPT] * 4, [params(Wanted(json=schema), seed) for schema in drawn])
    for schema, output in zip(drawn, outputs):
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            assert valid(json.loads(completion.text), schema, schema), (schema, completion.text)
        else:
            assert len(completion.token_ids) == 150


REGEXES = [
    r"[a-c]{2,5}",
    r"(yes|no|maybe)( indeed)*",
    r"\d{1,3}\.\d{1,3}",
    r"[^e]{10}",
    r"(é|日本|😀){1,4}!",
    r".{12}",
    r"a?b?c",
    r"[\w ]+\.",
]


@pytest.mark.parametrize("max_tokens", [2, 60])
def test_text_matches_its_regex_or_can_still_become_one(llm: LLM, max_tokens: int) -> None:
    patterns = REGEXES * 4
    wanted = [params(Wanted(regex=p), seed, max_tokens=max_tokens) for seed, p in enumerate(patterns)]
    reasons = set()
    for pattern, output in zip(patterns, llm.generate([PROMPT] * len(patterns), wanted)):
        completion = output.outputs[0]
        reasons.add(completion.finish_reason)
        whole, text = (
            completion.finish_reason == "stop",
            completion.text.rstrip("\ufffd") if max_tokens == 2 else completion.text,
        )
        found = regex.fullmatch(pattern, text, regex.DOTALL | regex.ASCII, partial=not whole)
        assert found, (pattern, text)
    assert "stop" in reasons and (max_tokens > 2 or "length" in reasons)


def test_choices_grammars_and_json_objects(llm: LLM) -> None:
    choices = ["yes", "no", 'quote " and \\', "line\nend", "yes, but", "日本", "\x01"]
    grammar = 'root ::= "(" root ")" | item item?\nitem ::= [xy] "," # pairs'
    kinds = [Wanted(choice=choices), Wanted(grammar=grammar), Wanted(json_object=True)] * 6
    outputs = llm.generate([PROMPT] * len(kinds), [params(kind, seed) for seed, kind in enumerate(kinds)])
    texts: dict[str, list[str]] = {}
    for kind, output in zip(kinds, outputs):
        if output.outputs[0].finish_reason == "stop":
            texts.setdefault(kind.key[0], []).append(output.outputs[0].text)
    assert set(texts["choice"]) <= set(choices) and len(texts["choice"]) == 6
    for text in texts["grammar"]:
        inner = re.fullmatch(r"(\(*)((?:[xy],){1,2})(\)*)", text)
        assert inner and len(inner[1]) == len(inner[3]), text
    assert all(isinstance(json.loads(text), dict) for text in texts.get("json_object", ["{}"]))


def test_the_end_of_text_comes_where_the_grammar_allows_it_and_not_when_it_is_to_be_ignored(llm: LLM) -> None:
    wanted = Wanted(regex="[ab]{2,}")
    eos = llm.tokenizer.eos_token_id
    assert eos is not None
    likely: dict[str, Any] = {"temperature": 2.0, "max_tokens": 100, "logit_bias": {eos: 6.0}}  # else it is very rare
    ended = llm.generate([PROMPT] * 8, [params(wanted, seed, **likely) for seed in range(8)])
    assert any(o.outputs[0].finish_reason == "stop" for o in ended)
    ignored = llm.generate([PROMPT] * 8, [params(wanted, seed, **likely, ignore_eos=True) for seed in range(8)])
    assert {o.outputs[0].finish_reason for o in ignored} == {"length"}
    assert not any(llm.tokenizer.is_special(t) for o in ended + ignored for t in o.outputs[0].token_ids[:-1])


def test_streamed_pieces_make_the_whole(llm: LLM) -> None:
    wanted = params(Wanted(choice=["日本語 text", "日本語 again"]), 3)
    whole = llm.generate(PROMPT, wanted)[0].outputs[0]
    pieces = [
        o.outputs[0]
        for o in llm.stream(PROMPT, params(wanted.structured_outputs, 3, output_kind=RequestOutputKind.DELTA))
    ]
    assert (
        "".join(piece.text for piece in pieces) == whole.text
        and pieces[-1].finish_reason == whole.finish_reason == "stop"
    )


# Among other requests


MIXED = [
    Wanted(regex="[a-z ]{100}"),
    None,
    Wanted(json={"type": "string", "minLength": 40, "maxLength": 60}),
    None,
    Wanted(choice=["one", "two"]),
    None,
]


def mixed_run(**settings: Any) -> tuple[list[list[int]], int]:
    prompts = [
        "To be, or not to be, that is the question:",
        PROMPT,
        "KING RICHARD III:\nNow",
        "First Citizen: We",
        "O",
        "What is thy name",
    ]
    each = [params(wanted, 7, max_tokens=80, temperature=0.9 if wanted else 0.0, ignore_eos=True) for wanted in MIXED]
    with LLM("gpt2-tiny", **({"kv_cache_memory_bytes": 50_000_000, "max_model_len": 128} | settings)) as llm:
        tokens = [o.outputs[0].token_ids for o in llm.generate(prompts, each)]
        check_invariants(llm.engine_core._core.scheduler)  # type: ignore[attr-defined]
        return tokens, llm.engine_core._core.scheduler.stats.num_preemptions  # type: ignore[attr-defined]


def test_neighbours_preemption_chunks_and_cache_size_change_nothing() -> None:
    together, _ = mixed_run()
    tiny = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 20, "block_size": 8, "max_model_len": 128}
    squeezed, preemptions = mixed_run(**tiny, max_num_batched_tokens=8, max_num_seqs=6, grammar_cache_size=1)
    assert preemptions > 0 and squeezed == together
    with LLM("gpt2-tiny", kv_cache_memory_bytes=50_000_000, max_model_len=128) as llm:
        alone = llm.generate(PROMPT, params(None, 7, max_tokens=80, temperature=0.0, ignore_eos=True))[0].outputs[0]
    assert together[1] == alone.token_ids


def test_the_second_request_finds_its_grammar_compiled(tmp_path: Path) -> None:
    with LLM("gpt2-tiny", trace=str(tmp_path), **SMALL) as llm:
        for pattern in ("[ab]{3}", "[cd]{3}", "[ab]{3}"):
            llm.generate(PROMPT, params(Wanted(regex=pattern)))
        with pytest.raises(InvalidRequestError):
            llm.generate(PROMPT, params(Wanted(grammar="root ::= nothing")))
    run = read_run(tmp_path)
    assert [e.args["cached"] for e in run.named("grammar.compiled")] == [False, False, True]
    assert run.named("grammar.compiled")[2].args["seconds"] == 0.0
    assert run.named("grammar.refused")[0].args["message"].endswith("cannot be used as a grammar")  # nothing is quoted


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted", [{"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2}}, {"json_object": True}]
)
def test_a_request_can_do_without_white_space_that_only_fills(wanted: dict[str, Any]) -> None:
    """Beside one for the same schema that may have it: they share no grammar."""
    with LLM("gpt2-tiny", **SMALL) as llm:
        compact = Wanted(**wanted, disable_any_whitespace=True)
        both = [params(each, seed) for seed in range(6) for each in (Wanted(**wanted), compact)]
        texts = [output.outputs[0].text for output in llm.generate([PROMPT] * len(both), both)]
    loose = re.compile(r"[\[{]\s|\s[\]}]|\s\s|\n\s*[\[{\"]|^\s")
    assert not [text for text in texts[1::2] if loose.search(text)]
    assert [text for text in texts[0::2] if loose.search(text)], "none is filled anyway: this shows nothing"


def test_who_was_preempted_waits_until_its_grammar_lets_it_go() -> None:
    """Also if another hook lets it go between the step that gave its token back and the next decision: a request is never released twice."""
    running = Accepted(set(), set(), {})
    moved = Accepted({"r"}, set(), {})
    manager = SimpleNamespace(
        accept_tokens=lambda sampled: running if sampled else moved, is_moving=lambda request: True
    )
    scheduler = SimpleNamespace(held={})
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
    hook = GrammarSchedulerHook(scheduler, config, manager)  # type: ignore[arg-type]
    request, step = SimpleNamespace(request_id="r"), SimpleNamespace(step=1)
    late = SimpleNamespace(sampled_token_ids={"r": [5]}, logprobs={})
    hook.executed(step, late)  # type: ignore[arg-type]
    assert late.sampled_token_ids == {} and hook.holds(request)  # type: ignore[arg-type]
    scheduler.held["r"] = request  # it was preempted
    given_back = SimpleNamespace(sampled_token_ids={}, logprobs={})
    hook.executed(step, given_back)  # type: ignore[arg-type]
    assert given_back.sampled_token_ids == {"r": [5]}
    assert hook.holds(request)  # type: ignore[arg-type]
    assert list(hook.released()) == ["r"] and not hook.holds(request)  # type: ignore[arg-type]
