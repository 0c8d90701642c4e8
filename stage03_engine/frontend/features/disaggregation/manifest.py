"""`--disaggregate P:D`: some engines compute prompts, others go on with them (vLLM: disaggregated prefilling)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stage03_engine.args.cpu import find_cores
from stage03_engine.args.fields import internal, option
from stage03_engine.errors import ConfigError
from stage03_engine.plugins import Feature

if TYPE_CHECKING:
    from stage03_engine.config import VllmConfig

_ROOM = "stage03_engine.frontend.features.disaggregation."
_MOST = 64

_OWN, _ONE_MACHINE = "the engines get their roles and their connector from P:D", "P:D engines run on this machine"
CONFLICTS = {
    "data_parallel_size": "P:D says how many engines there are",
    "kv_transfer_config": _OWN,
    "kv_offloading_size": _OWN,
    "tensor_parallel_size": "each worker has only a slice of a block",
    "pipeline_parallel_size": "each worker has only some layers of a block",
    "distributed_executor_backend": "the engine's own process sends and receives the blocks",
    "data_parallel_rank": _ONE_MACHINE,
    "data_parallel_external_lb": _ONE_MACHINE,
    "data_parallel_hybrid_lb": _ONE_MACHINE,
    "data_parallel_size_local": _ONE_MACHINE,
    "data_parallel_start_rank": _ONE_MACHINE,
    "enable_weight_updates": "blocks on their way hold keys and values of the old weights",
}
"""What cannot be given too -> why. `Feature.conflicts` comes too late: by then P:D has set data_parallel_size."""
ONE_SERVER = "disaggregate needs api_server_count 1: one API server knows where each request's blocks are"
_UNSET = {
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "distributed_executor_backend": "uni",
}


@dataclass(frozen=True)
class DisaggregationConfig:
    """Engines with different roles."""

    disaggregate: str | None = option(
        None,
        "P:D, as in 1:1: start P engines that compute prompts and D engines that go on with them; the KV-cache blocks travel over sealed links. Long "
        "prompts then hold up no running request",
    )
    max_local_prefill_length: int = option(
        32,
        "with --disaggregate: a decode engine computes a prompt itself if its prefix cache lacks at most this many of the prompt's tokens; 0 sends every "
        "prompt of a block or more to a prefill engine first",
        at_least=0,
    )
    num_prefill: int = internal(0)
    num_decode: int = internal(0)


@dataclass(frozen=True)
class DisaggregationFlags:
    """Part of VllmConfig."""

    disaggregation_config: DisaggregationConfig = DisaggregationConfig()

    @staticmethod
    def detect(values: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Each engine gets its part of the cores."""
        if values.get("disaggregate") is None or values["data_parallel_size"] != 1:
            return {}
        here, cores = sum(sizes_of(values["disaggregate"])), find_cores()
        return {"num_threads": (max(1, cores.compute // here), f"{cores}, shared by {here} engines")}

    @staticmethod
    def resolve(values: Mapping[str, Any], files: object) -> dict[str, Any]:
        """So many engines. Raises ConfigError."""
        if values.get("disaggregate") is None:
            return {}
        num_prefill, num_decode = sizes_of(values["disaggregate"])
        for name, why in CONFLICTS.items():
            if values.get(name) not in (None, False, _UNSET.get(name)):
                raise ConfigError(f"disaggregate cannot be combined with {name}: {why}; leave out one of the two")
        both = num_prefill + num_decode
        return {"num_prefill": num_prefill, "num_decode": num_decode, "data_parallel_size": both}

    @staticmethod
    def check(config: VllmConfig) -> None:
        """Raises ConfigError for what blocks that travel cannot meet."""
        if config.disaggregation_config.disaggregate is None:
            return
        if not config.cache_config.enable_prefix_caching:
            raise ConfigError("disaggregate needs enable_prefix_caching: blocks are found by the same hashes")
        if "generate" not in config.supported_tasks:
            raise ConfigError("disaggregate is for models that generate text; leave it out for this one")

    @staticmethod
    def hooks(config: VllmConfig) -> dict[str, list[str]]:
        """The client that knows who does what. Raises ConfigError for several API servers, of which the launcher tells the settings later than `check` is called."""
        is_on = config.disaggregation_config.disaggregate is not None
        if is_on and getattr(getattr(config, "front_ends", None), "num_front_ends", 1) > 1:
            raise ConfigError(ONE_SERVER)
        return {"client": [_ROOM + "client:DisaggregatedClient"] * is_on}


def sizes_of(text: str) -> tuple[int, int]:
    """`2:1` -> (2, 1). Raises ConfigError."""
    words = text.strip().split(":")
    are_numbers = len(words) == 2 and all(word.isascii() and word.isdigit() and len(word) <= 2 for word in words)
    num_prefill, num_decode = map(int, words) if are_numbers else (0, 0)
    if not num_prefill or not num_decode or num_prefill + num_decode > _MOST:
        raise ConfigError(
            f"disaggregate must be P:D, such as 1:1 (P engines that compute prompts, D that go on with them, 1 of each at least, {_MOST} in all at most), not {text[:50]!r}"
        )
    return num_prefill, num_decode


FEATURE = Feature(
    name="disaggregation",
    help="some engines compute prompts, others go on with them; KV-cache blocks travel between them",
    room=__package__,
    settings={"VllmConfig": DisaggregationFlags},
    needs=("p2p_connector", "data_parallel", "nodes"),
    after=("data_parallel",),
    events=("dp.prefilled",),
)
