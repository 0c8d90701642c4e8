"""Are these embeddings the model's, and can the rest of the request be had with them? No torch. Large ones are decoded in a thread, as long prompts are."""

from __future__ import annotations

import msgspec

from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.input_processor import InputHook
from stage03_engine.params.embeds_file import FIELD, as_file, check_numbers, layout_of, wrong
from stage03_engine.sampling_params import SamplingParams

_NO_TOKENS = "the prompt has no token ids, which it would need"
REFUSED = {
    "repetition_penalty": (1.0, _NO_TOKENS),
    "bad_words": ([], _NO_TOKENS),
    "prompt_logprobs": (None, _NO_TOKENS),
    "truncate_prompt_tokens": (None, "cut the tensor instead"),
}
"""Parameter -> its value when it is off, and why it cannot be had."""


class PromptEmbedsInputHook(InputHook):
    """Called for requests with embeddings."""

    def prompt(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The placeholders. Raises InvalidRequestError before anything is decoded."""
        config = self.processor.vllm_config
        if not config.model_config.enable_prompt_embeds:
            raise wrong("start the engine with --enable-prompt-embeds")
        if getattr(getattr(config, "parallel_config", None), "pipeline_parallel_size", 1) > 1:
            raise wrong("with --pipeline-parallel-size above 1 only token ids reach the first stage")
        for name, (off, why) in REFUSED.items():
            if getattr(params, name, off) not in (off, None):
                raise InvalidRequestError(f"{name} cannot be combined with {FIELD}: {why}.", name)
        if any(token_ids):
            raise wrong("beside embeddings leave the prompt out, or give token 0 once for each row")
        return list(token_ids)

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """With the file itself, checked. Raises InvalidRequestError."""
        file = as_file(params.prompt_embeds or b"")
        layout, width = layout_of(file[: 8 + 4096], len(file)), self.processor.vllm_config.shape.hidden_size
        if layout.width != width:
            raise wrong(f"each row must have {width} numbers, as the model's embeddings do, not {layout.width}")
        check_numbers(file, layout)
        return msgspec.structs.replace(params, prompt_embeds=file)
