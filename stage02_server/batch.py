"""One HTTP request as the engine requests that it became, and what is to be said of their outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from stage02_server.features.per_request_metrics import PerRequestMetrics, metrics_of
from stage02_server.middleware import RequestIds
from stage02_server.protocol_response import PromptTokensDetails, UsageInfo
from stage03_engine.frontend.features.beam_search import BeamSearchParams
from stage03_engine.frontend.stats import RequestStats
from stage03_engine.messages import EngineCoreRequest, TokenLogprobs
from stage03_engine.outputs import RequestOutput


@dataclass
class Batch:
    """The engine requests that one HTTP request became, one per prompt; answer k of prompt p is number p * n + k."""

    ids: RequestIds
    model: str
    n: int
    requests: list[EngineCoreRequest]
    beam: BeamSearchParams | None = None  # search instead of sampling
    tokens_as_ids: bool = False  # tokens in logprobs read "token_id:5", which no two tokens share
    return_token_ids: bool = False  # beside every text the ids of its tokens
    prompt_text: str | None = None  # of a chat, if it is to be told
    tells_metrics: bool = False  # --enable-per-request-metrics
    ended: list[RequestStats] = field(default_factory=list)  # the histories of the answers that have ended
    prompt_only: bool = False  # the engine draws a token because it must; nobody is to see it
    cached_tokens: dict[int, int] = field(default_factory=dict)  # prompt -> its tokens from the prefix cache
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(
        default_factory=dict
    )  # prompt -> as in RequestOutput

    def take_note(self, prompt: int, output: RequestOutput) -> None:
        """Remember what an output says about its prompt, and with `prompt_only` take the answer out of it."""
        self.cached_tokens[prompt] = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = output.prompt_logprobs
        self.ended += [answer.stats for answer in output.outputs if answer.stats is not None]
        if self.prompt_only:
            for answer in output.outputs:
                answer.text, answer.token_ids = "", []
                answer.logprobs = None if answer.logprobs is None else []
                answer.finish_reason, answer.stop_reason = "length", None

    def shown_prompt_ids(self, index: int) -> list[int] | None:
        """The token ids of the prompt of answer `index`, if they were asked for."""
        return self.requests[index // self.n].prompt_token_ids if self.return_token_ids else None

    def metrics(self) -> PerRequestMetrics | None:
        """How long it took, if that is to be told and there is a token to tell of."""
        return metrics_of([stats for stats in self.ended if stats.num_output_tokens]) if self.tells_metrics else None

    def usage(self, completion_tokens: list[int]) -> UsageInfo:
        """Totals, from the output tokens of each answer."""
        prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        return make_usage(prompt, sum(completion_tokens), sum(self.cached_tokens.values()))

    def usage_of(self, index: int, completion_tokens: int) -> UsageInfo:
        """The usage of one answer alone."""
        prompt = index // self.n
        num_tokens = len(self.requests[prompt].prompt_token_ids)
        return make_usage(num_tokens, completion_tokens, self.cached_tokens.get(prompt, 0))


def make_usage(prompt: int, completion: int, cached: int = 0) -> UsageInfo:
    """From the tokens of the prompt, those of the answer, and those of the prompt that cost nothing."""
    return UsageInfo(
        prompt_tokens=prompt,
        total_tokens=prompt + completion,
        completion_tokens=completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
