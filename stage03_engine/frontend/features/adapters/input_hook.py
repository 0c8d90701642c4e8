"""The adapter that a request names must be there."""

from __future__ import annotations

import itertools

import msgspec

from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.features.adapters.registry import registry_of
from stage03_engine.frontend.input_processor import InputHook
from stage03_engine.params.lora import check_kinds
from stage03_engine.sampling_params import SamplingParams

MOST_SHOWN = 10


class LoRAInputHook(InputHook):
    """Called for requests with an adapter."""

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """With the number of the adapter, by which the engine knows it. Raises InvalidRequestError for one that is not loaded."""
        check_kinds(lora=(params.lora, str))
        known = registry_of(self.processor).known
        if (adapter := known.get(params.lora or "")) is None:
            names = list(itertools.islice(tuple(known), MOST_SHOWN))
            shown = ", ".join(names) + ", ..." * (len(known) > MOST_SHOWN)
            raise InvalidRequestError(
                f"lora: there is no adapter {str(params.lora)[:100]!r}; there are "
                f"{shown or 'none (--enable-lora --lora-modules name=folder)'}.",
                "lora",
            )
        return msgspec.structs.replace(params, lora_int_id=adapter.number)
