"""Log-probabilities of the tokens of a prompt."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

FEATURE = Feature(
    name="prompt_logprobs",
    help="log-probabilities of the tokens of a prompt",
    room=__package__,
    also=("stage03_engine.params.prompt_logprobs", "stage02_server.features.prompt_logprobs"),
    parts=(
        Part("params", "stage03_engine.params.prompt_logprobs:PromptLogprobs"),
        Part("request", "stage02_server.features.prompt_logprobs.fields:PromptLogprobsFields", key="SamplingRequest"),
        *(
            Part("response", "stage02_server.features.prompt_logprobs.fields:PromptLogprobsOfAnswer", key=answer)
            for answer in ("CompletionChoice", "ChatCompletionResponse")
        ),
        Part("server", "stage02_server.features.prompt_logprobs.answer:PromptLogprobsHook", key="logprobs_of_prompt"),
        Part("replay", ".recorded_prompts:RecordedPromptLogprobsHook", key="prompt_logprobs"),
    ),
    after=("beam_search",),
)
