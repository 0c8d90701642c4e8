"""The request fields of beam search (vllm/sampling_params.py, BeamSearchParams)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from pydantic import Field, FiniteFloat

from stage02_server.protocol_types import RequestFields
from stage03_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from stage03_engine.frontend.async_llm import AsyncLLM
    from stage03_engine.frontend.features.beam_search.beam_search import BeamSearchParams
    from stage03_engine.messages import EngineCoreRequest
    from stage03_engine.outputs import RequestOutput

BEAM_SEARCH = "stage03_engine.frontend.features.beam_search.beam_search:search"
_USED = ("max_tokens", "ignore_eos", "skip_special_tokens", "truncate_prompt_tokens", "truncation_side", "output_kind")
_IGNORED = ("n", "temperature", "top_p", "top_k", "min_p", "seed", "include_stop_str_in_output", "extra_args",
    "spaces_between_special_tokens", "stream_interval", "structured_outputs")  # fmt: skip


class BeamSearchFields(RequestFields):
    """Search for the most likely answers instead of sampling."""

    use_beam_search: bool | None = Field(
        default=False, description="Look for the likeliest whole answers, n at a time, instead of drawing tokens."
    )
    length_penalty: FiniteFloat | None = Field(
        default=1.0, description="Beam search: above 1 prefers long answers, below 1 short ones."
    )
    early_stopping: bool | None = Field(
        default=False, description="Beam search: end when n answers are complete, without looking for better ones."
    )

    def apply(self, params: dict[str, Any]) -> None:
        """Keep the settings of the prompt and the length. Settings of sampling (temperature, ..., seed) are ignored, as in
        vLLM; what would change the answer is refused."""
        if not self.use_beam_search:
            return
        from stage03_engine.sampling_params import SamplingParams

        if getattr(self, "stream", False):
            raise InvalidRequestError("stream cannot be combined with use_beam_search.", "stream")
        plain = SamplingParams()
        for name in [name for name in params if name not in _USED + _IGNORED]:
            sent = getattr(self, name, params[name])  # defaults of the model are not what the client asked for
            if not (sent is None or sent is False or sent == getattr(plain, name)):
                raise InvalidRequestError(f"{name} cannot be combined with use_beam_search.", name)
        if (structured := params.get("structured_outputs")) is not None:
            field = "tool_choice" if structured.source == "tools" else "use_beam_search"
            raise InvalidRequestError("Structured output cannot be combined with use_beam_search.", field)
        self._search_params()
        for name in params.keys() - set(_USED):
            del params[name]
        params["temperature"] = 0.0

    def _search_params(self) -> BeamSearchParams:
        from stage03_engine.frontend.features.beam_search.beam_search import BeamSearchParams

        n = getattr(self, "n", None)
        return BeamSearchParams(
            beam_width=1 if n is None else n,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=bool(self.early_stopping),
        )

    def generate(self, engine: AsyncLLM, request: EngineCoreRequest) -> AsyncGenerator[RequestOutput, None] | None:
        """One output per prompt, with the sequences that the search found."""
        if not self.use_beam_search:
            return None
        from stage03_engine.mixins import load

        return load(BEAM_SEARCH)(engine, request, self._search_params(), None)
