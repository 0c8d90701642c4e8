"""One answer that cannot be made ends that answer: whatever fails while it is made, the others go on, and so does the server."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from server_under_test import InProcessServer, byte_config

from stage03_engine.frontend.detokenizer import IncrementalDetokenizer
from stage03_engine.frontend.metrics import IterationStats
from stage03_engine.frontend.output_processor import OutputProcessor, RequestState
from stage03_engine.frontend.tokenizer import init_tokenizer_from_configs
from stage03_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from stage03_engine.outputs import RequestOutput
from stage03_engine.sampling_params import SamplingParams

MADE_BY = {
    f"{owner.__name__}.{name}": (owner, name)
    for owner in (RequestState, IncrementalDetokenizer)
    for name, each in vars(owner).items()
    if inspect.isfunction(each) and name != "__init__"
}
"""All that an answer is made by, once its request is known."""


class Queue(list):
    put = list.append
    __bool__ = lambda self: True  # noqa: E731


def fails_for(bad: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for the detokenizer or state of one request."""

    def function(self: Any, *args: Any, **given: Any) -> Any:
        if self in (bad, bad.detokenizer):
            raise LookupError("no such token")
        return plain(self, *args, **given)

    return function


@pytest.mark.parametrize("ends", [None, FinishReason.LENGTH], ids=["goes on", "ends"])
@pytest.mark.parametrize("made_by", MADE_BY)
def test_an_answer_that_cannot_be_made_ends_alone(
    made_by: str, ends: FinishReason | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = MADE_BY[made_by]
    processor = OutputProcessor(init_tokenizer_from_configs(byte_config()))
    queues = {request_id: Queue() for request_id in ("first", "bad", "last")}
    for request_id, queue in queues.items():
        request = EngineCoreRequest(request_id, [1], SamplingParams(stop=["x"]), 0.0)
        processor.add_request(request, queue=queue)
    monkeypatch.setattr(owner, name, fails_for(processor.request_states["bad"], getattr(owner, name)))
    outputs = [EngineCoreOutput(request_id, [65], finish_reason=ends) for request_id in queues]
    _, reqs_to_abort = processor.process_outputs(outputs, IterationStats())
    if len(queues["bad"]) and isinstance(queues["bad"][-1], RequestOutput):
        assert name == "finish" and ends is None  # nothing asked for it
        return
    assert [type(each) for each in queues["bad"]] == [LookupError]
    assert reqs_to_abort == ([] if ends else ["bad"]), "the engine ends what nobody reads"
    for request_id in ("first", "last"):
        processor.process_outputs(
            [EngineCoreOutput(request_id, [66], finish_reason=FinishReason.LENGTH)], IterationStats()
        )
        assert [each.finished for each in queues[request_id]][-1] and len(queues[request_id]) == (1 if ends else 2)
    assert not processor.request_states and not processor.external_req_ids


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_server_goes_on(stream: bool) -> None:
    server = InProcessServer()
    try:
        tokenizer = server.engine.output_processor._tokenizer
        known, (unknown,) = tokenizer.piece, tokenizer.encode("!")
        tokenizer.piece = lambda token_id: known(token_id) if token_id != unknown else {}[token_id]
        body = {"prompt": "never!", "max_tokens": 8, "stream": stream}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == (200 if stream else 500) and "InternalServerError" in answer.text
        assert server.request("GET", "/health").status_code == 200
        assert server.post("/v1/completions", body | {"prompt": "ever", "stream": False}).json()["choices"][0]["text"]
        assert len(server.client.aborted) == 1 and not server.engine.num_unfinished_requests
    finally:
        server.close()
