"""The pace of a load: what joins, leaves and is answered before which step."""

from __future__ import annotations

import pytest

from stage01_cli.tools.course.differences import _PART
from stage01_cli.tools.course.exercised import exercised, in_words, missing
from stage01_cli.tools.course.exercises import exercises
from stage01_cli.tools.course.load import Answer, asks, differing
from stage01_cli.tools.course.pace import Pace, name_of
from stage01_cli.tools.course.serving import RECORDED
from stage03_engine.messages import EngineCoreOutput, FinishReason


def tokens(name: str, number: int, ended: bool = False) -> EngineCoreOutput:
    return EngineCoreOutput(f"cmpl-{name}-5f3a9b1c", [7] * number, None, FinishReason.LENGTH if ended else None)


def test_requests_join_by_step_or_after_anothers_token() -> None:
    load = asks([{"prompt": "a"}, {"prompt": "b", "step": 3}, {"prompt": "c", "after": "r0:2"}])
    pace = Pace([ask.pace() for ask in load])
    joined = []
    for _ in range(4):
        joined.append(pace.joining(idle=False))
        pace.joined += joined[-1]
        pace.saw([tokens("r0", 1)])
    assert joined == [["r0"], [], ["r1", "r2"], []]


def test_whoever_is_next_comes_early_when_nobody_is_there() -> None:
    pace = Pace([{"name": "a", "step": 90}, {"name": "b", "step": 95}])
    assert pace.joining(idle=False) == [] and pace.joining(idle=True) == ["a"]


def test_who_comes_after_one_that_has_ended_early_comes_too() -> None:
    pace = Pace([{"name": "a", "step": 1}, {"name": "b", "after": ["a", 9]}])
    pace.joined.append("a")
    pace.saw([tokens("a", 2, ended=True)])
    assert pace.joining(idle=False) == ["b"]


def test_a_client_has_left_after_its_token_and_not_before() -> None:
    pace = Pace([{"name": "a", "step": 1, "gone": 2}, {"name": "b", "step": 1, "gone": 2}])
    pace.joined += ["a", "b"]
    pace.saw([tokens("a", 1), tokens("b", 1)])
    assert pace.leaving() == []
    pace.saw([tokens("a", 1), tokens("b", 1, ended=True)])  # b has come to its end: nobody waits for it
    assert pace.leaving() == ["a"]


def test_calls_are_answered_before_their_step_or_when_all_is_over() -> None:
    pace = Pace([], calls=2, calls_step=2)
    assert not pace.calls_due(idle=False) and pace.calls_due(idle=True)
    pace.saw([])
    assert pace.calls_due(idle=False)


def test_ids_of_the_engine_are_names_of_the_load() -> None:
    assert [name_of(each) for each in ("cmpl-r0-5f3a9b1c", "chatcmpl-chat3-00aa-0", "?")] == ["r0", "chat3", "?"]


@pytest.mark.parametrize("after", ["r1:2", "r0", "r0:", "r0:x"])
def test_a_load_may_only_wait_for_a_request_above(after: str) -> None:
    with pytest.raises(ValueError, match="names no request above"):
        asks([{"prompt": "a"}, {"prompt": "b", "after": after}])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"logprobs": [{"its own": -1.0005, "x": -1.0}]}, ""),
        ({"token_ids": [5, 7]}, "its token 2 is 6 in A and 7 in B"),
        ({"token_ids": [5]}, "it has 2 tokens in A and 1 in B"),
        ({"text": "a"}, "A 'ab'"),
        ({"ended": "stop 'b'"}, "stop 'b'"),
        ({"logprobs": []}, "log-probabilities of 1 tokens in A and of 0"),
        ({"logprobs": [{"its own": -1.1, "x": -1.0}]}, "the log-probabilities of its token 1"),
        ({"logprobs": [{"its own": -1.0, "y": -1.0}]}, "the log-probabilities of its token 1"),
    ],
)
def test_answers_differ_in_text_tokens_end_and_log_probabilities(change: dict[str, object], said: str) -> None:
    fields: dict[str, object] = {
        "text": "ab", "token_ids": [5, 6], "logprobs": [{"its own": -1.0, "x": -1.0}], "ended": "length", "events": 2,
    }  # fmt: skip
    a, b = Answer(**fields), Answer(**fields | change | {"events": 3})  # type: ignore[arg-type]
    assert said in differing(a, b) and bool(said) == bool(differing(a, b))


@pytest.mark.parametrize(
    ("run", "counts"),
    [
        ("mixed", {"clients": 8, "chunks": 1, "mixed_steps": 1, "waits_for_budget": 1}),
        ("preemption", {"preemptions": 1, "waits_for_blocks": 1}),
        ("prefix_hits", {"prefix_hits": 3, "hit_tokens": 48}),
        ("speculative", {"accepted": 1, "rejected": 1}),
        ("client_abort", {"aborts": 1}),
        ("tp2", {"workers": 2, "exchanges": 10}),
    ],
)
def test_what_a_recording_has_exercised(run: str, counts: dict[str, int]) -> None:
    found = exercised(RECORDED / run, (), {})
    assert not missing(counts, found), in_words(found)
    [short] = missing({"stops": 3}, found)
    assert short == "stop strings: 0, and at least 3 belong to it"


def test_an_easy_run_has_exercised_nothing_of_it() -> None:
    found = exercised(RECORDED / "one_request", (), {})
    assert found["clients"] == 1
    hard = ("chunks", "mixed_steps", "preemptions", "prefix_hits", "aborts", "stops", "mixed_draws", "waits_for_budget")
    assert not found.keys() & {*hard}


def test_every_exercise_says_what_its_load_must_exercise() -> None:
    for exercise in exercises().values():
        serve = exercise.serve
        assert len(serve.load) >= 2 and len(serve.exercises) >= 3, exercise.name
        assert all(number > 0 for number in serve.exercises.values())
        assert all(ask.stopped for ask in serve.load if "stops" in serve.exercises and ask.body.get("stop")), (
            exercise.name
        )


def test_the_file_behind_a_flag_is_no_difference() -> None:
    a, b = (f"('student_{name}:NoRepeatNgram',) from command line (--x)" for name in ("reference", "ex15_feature"))
    (one, other), unchanged = (_PART.sub("", each) for each in (a, b)), "4 from config file (a)"
    assert one == other != a and _PART.sub("", unchanged) == unchanged
