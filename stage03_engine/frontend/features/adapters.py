"""The adapter that a request names must be there."""

from __future__ import annotations

import msgspec

from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.input_processor import InputHook
from stage03_engine.sampling_params import SamplingParams


class LoRAInputHook(InputHook):
    """Called for requests with an adapter."""

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Raises InvalidRequestError for one that was not loaded."""
        config = self.processor.vllm_config.lora_config
        known = config.adapters() if config.enable_lora else {}
        if params.lora not in known:
            shown = ", ".join(known) or "none (--enable-lora --lora-modules name=folder)"
            raise InvalidRequestError(
                f"lora: there is no adapter {str(params.lora)[:100]!r}; there are {shown}.", "lora"
            )
        number = list(known).index(params.lora) + 1  # as the engine numbers them when it starts
        return msgspec.structs.replace(params, lora_int_id=number)
