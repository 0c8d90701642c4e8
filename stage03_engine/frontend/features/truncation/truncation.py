"""`truncate_prompt_tokens` and `truncation_side`: a prompt that is too long is cut."""

from __future__ import annotations

from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.input_processor import InputHook
from stage03_engine.sampling_params import SamplingParams


class Truncation(InputHook):
    """Keeps the last `truncate_prompt_tokens` tokens, or the first with `truncation_side` "right"; with -1 as many as leave room
    for one token of output."""

    def prompt(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Raises InvalidRequestError if more are asked for than the context holds."""
        keep, max_model_len = params.truncate_prompt_tokens, self.processor.vllm_config.max_model_len
        if keep > max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most the context length, {max_model_len}, got {keep}.",
                "truncate_prompt_tokens",
            )
        keep = max_model_len - 1 if keep == -1 else keep
        return token_ids[:keep] if params.truncation_side == "right" else token_ids[-keep:]
