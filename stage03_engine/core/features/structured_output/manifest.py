"""The flags of structured output (vllm/config, StructuredOutputsConfig)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stage03_engine.args.fields import option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature, Part

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """What a request's grammar may cost."""

    grammar_cache_size: int = option(
        32,
        "maximum number of compiled grammars of each API key; unused ones stay compiled until their place is needed",
        at_least=1,
    )
    grammar_compile_seconds: float = option(
        5.0, "CPU seconds that compiling one grammar may take; it is tried in a process that can be stopped"
    )
    max_waiting_grammars: int = option(
        1024,
        "most different grammars of each API key that wait to be compiled, or are being compiled (429 beyond)",
        at_least=1,
    )
    grammar_budget_seconds: float = option(
        0.05,
        "seconds that a step waits for all grammars together; requests whose grammar needs longer sit out the next steps",
    )
    grammar_step_seconds: float = option(
        0.5, "seconds that one grammar may compute to find the tokens that may follow; then its request ends"
    )
    disable_any_whitespace: bool = option(
        False, "write JSON in one line: otherwise a small model may fill its answer with spaces"
    )
    grammar_memory_bytes: int = option(
        512 * 1024**2, "bytes that compiling one grammar may take (enforced on Linux)", at_least=1
    )


@dataclass(frozen=True)
class StructuredOutputsFlags:
    """Part of VllmConfig."""

    structured_outputs_config: StructuredOutputsConfig = StructuredOutputsConfig()

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for a time limit that is too short to do anything, or longer than an hour."""
        for name, least in {
            "grammar_compile_seconds": 0.01,
            "grammar_budget_seconds": 0.0001,
            "grammar_step_seconds": 0.01,
        }.items():
            seconds = getattr(config.structured_outputs_config, name)
            if not least <= seconds <= 3600.0:
                raise ConfigError(f"{name} must be in [{least}, 3600], not {seconds}")


FEATURE = Feature(
    name="structured_output",
    help="answers that match a JSON schema, a regular expression, a grammar, or one of several texts",
    room=__package__,
    also=(
        "stage03_engine.grammar",
        "stage03_engine.params.structured_outputs",
        "stage02_server.features.structured_outputs",
        "stage04_kernels.features.bitmask",
    ),
    settings={"VllmConfig": StructuredOutputsFlags},
    parts=(
        Part("params", "stage03_engine.params.structured_outputs:StructuredOutputs"),
        Part(
            "request",
            "stage02_server.features.structured_outputs.fields:StructuredOutputsFields",
            key="SamplingRequest",
        ),
        Part("replay", ".recorded_grammars:RecordedGrammarHook", key="grammar"),
        Part("content", "stage02_server.features.structured_outputs.fields:RefusalPart", key="refusal"),
    ),
    needs=("turns",),
    after=("beam_search",),
    events=("grammar.compiled", "grammar.missed", "grammar.ready", "grammar.refused", "sampler.transform"),
)
