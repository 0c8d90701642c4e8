"""The adapter of a request (vLLM: LoRARequest)."""

from __future__ import annotations

from typing import ClassVar

from stage03_engine.errors import InvalidRequestError

_WORDS = {str: "a text", int: "an integer", bool: "true or false"}


class LoRA:
    """Part of SamplingParams."""

    __slots__ = ()
    HOOKS: ClassVar[dict[str, dict[str, str]]] = {
        "lora": {
            "input": "stage03_engine.frontend.features.adapters.input_hook:LoRAInputHook",
            "series": "stage03_engine.frontend.features.adapters.leases:AdapterLease",
        }
    }
    lora: str | None = None  # the name of an adapter
    lora_int_id: int = 0  # its number, by which the engine knows it; set by the front end


def check_kinds(**given: tuple[object, type]) -> None:
    """name=(value, kind). Raises InvalidRequestError that names the first value of another kind: for Python, `True` is number 1, and found as such."""
    for name, (value, kind) in given.items():
        if type(value) is not kind:
            raise InvalidRequestError(f"{name} must be {_WORDS[kind]}, not {repr(value)[:100]}.", name)
