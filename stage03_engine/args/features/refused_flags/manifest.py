"""vLLM's flags and request fields that are not built."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

EPILOG = (
    "vLLM's other flags are known: what is not built is accepted at the value that asks for nothing; at any other it is ignored "
    "with a warning where it would change no token, and else refused with the reason."
)
_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN", "TORCH_SDPA", "CPU_ATTN")
WORDS = {"attention_backend": dict.fromkeys(_BACKENDS, "auto"), "max_model_len": {"auto": "none", "-1": "none"}}
"""Settings that are here too -> vLLM's word for a value -> ours. Here, as every value that is given is looked up."""


def other_word(setting: str, value: str) -> str:
    """vLLM's word for a value of one of our settings in ours."""
    return WORDS.get(setting, {}).get(value, value)


FEATURE = Feature(
    name="refused_flags",
    help="vLLM's flags and request fields that are not built, each with its reason; accepted where they ask for nothing",
    room=__package__,
    parts=(
        Part("engine", ".refused:add_tables", key="refused_flags"),
        Part("engine", ".refused:accepts_key", key="refused_keys"),
        Part("engine", ".refused:check_fields", key="refused_fields"),
        Part("engine", ".manifest:other_word", key="vllms_words"),
        Part("engine", ".manifest:EPILOG", key="epilog"),
    ),
)
