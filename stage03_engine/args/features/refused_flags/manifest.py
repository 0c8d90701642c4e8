"""vLLM's flags and request fields that are not built."""

from __future__ import annotations

from stage03_engine.plugins import Feature, Part

EPILOG = (
    "vLLM's other flags are known: what is not built is accepted at the value that asks for nothing; at any other it is ignored "
    "with a warning where it would change no token, and else refused with the reason."
)
FEATURE = Feature(
    name="refused_flags",
    help="vLLM's flags and request fields that are not built, each with its reason; accepted where they ask for nothing",
    room=__package__,
    parts=(
        Part("engine", ".refused:add_tables", key="refused_flags"),
        Part("engine", ".refused:accepts_key", key="refused_keys"),
        Part("engine", ".refused:check_fields", key="refused_fields"),
        Part("engine", ".refused:other_word", key="vllms_words"),
        Part("engine", ".manifest:EPILOG", key="epilog"),
    ),
)
