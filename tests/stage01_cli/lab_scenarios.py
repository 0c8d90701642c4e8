"""Scenarios of the scheduler's laboratory, for its tests: any within bounds, and those of recordings."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from stage01_cli.tools.lab.scenario import POLICIES, PREFIXES
from stagetrace import Event

SETTINGS = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.sampled_from([1, 5, 16, 64]), "num_gpu_blocks_override": st.sampled_from([2, 7, 14, 60]),
        "block_size": st.sampled_from([1, 4, 8]), "max_num_seqs": st.sampled_from([1, 3, 8]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3]), "scheduling_policy": st.sampled_from(POLICIES),
        "enable_chunked_prefill": st.booleans(), "enable_prefix_caching": st.booleans(),
    }
)  # fmt: skip
REQUEST = st.fixed_dictionaries(
    {
        "arrival": st.integers(1, 20), "prompt": st.integers(1, 40), "output": st.integers(1, 16), "priority": st.integers(-2, 2),
        "prefix": st.sampled_from(["", *PREFIXES[:2]]), "share": st.floats(0, 1),
    }
)  # fmt: skip


def _named(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three HTTP requests share the turns of the fair policy."""
    shared = [int(each.pop("share") * each["prompt"]) for each in requests]
    return [each | {"id": f"cmpl-{i % 3}-{i}", "shared": shared[i]} for i, each in enumerate(requests)]


SCENARIOS = st.fixed_dictionaries(
    {"settings": SETTINGS, "requests": st.lists(REQUEST, min_size=1, max_size=8).map(_named)}
)


def scenario_of(events: list[Event]) -> dict[str, Any]:
    """The load and the settings of a recording of one engine. Its requests are r0, r1, ... by arrival."""
    created = next(event.args for event in events if event.name == "scheduler.created")
    step, requests, hashes = 0, list[dict[str, Any]](), list[list[str]]()
    for event in events:
        if event.name == "engine.step":
            step = event.step or 0
        elif event.name == "sched.queued":
            own = event.args["block_hashes"]
            shared = max((sum(a == b for a, b in zip(own, other)) for other in hashes), default=0)
            hashes.append(own)
            requests.append(
                {
                    "id": f"r{len(requests)}", "arrival": step + 1, "prompt": event.args["num_prompt_tokens"],
                    "output": event.args["params"]["max_tokens"], "shared": shared * created["cache_config"]["block_size"],
                }
            )  # fmt: skip
    longest = max(request["shared"] for request in requests)
    for request in requests:  # whoever others share with comes first, and shares too
        if longest and (request["shared"] or request is requests[0]):
            request |= {"prefix": "A", "shared": longest}
    mine = (
        "max_num_batched_tokens",
        "max_num_seqs",
        "long_prefill_token_threshold",
        "scheduling_policy",
        "enable_chunked_prefill",
    )
    settings = {name: created["scheduler_config"][name] for name in mine}
    # the laboratory's most, which no recording here reaches
    settings["max_num_seqs"] = min(64, settings["max_num_seqs"])
    cache = created["cache_config"]
    settings |= {"block_size": cache["block_size"], "enable_prefix_caching": cache["enable_prefix_caching"]}
    return {"settings": settings | {"num_gpu_blocks_override": min(513, created["num_blocks"])}, "requests": requests}


def decisions(events: list[Event], names: dict[str, str]) -> list[tuple[Any, ...]]:
    """What a scheduler and its block pool did, in order: every event but for what differs by the made-up tokens. `names`: request ->
    what it is called."""
    told = []
    for event in events:
        if event.name.startswith(("sched.", "kv.")):
            left_out = ("params", "block_hashes", "token_ids", "group")
            args = {key: _renamed(value, names) for key, value in event.args.items() if key not in left_out}
            told.append((event.name, names.get(event.req or "", event.req), args))
    return told


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(each, names) for each in value]
    return names.get(value, value) if isinstance(value, str) else value
