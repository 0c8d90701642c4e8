"""A router: which of several engines gets a request.

Open-ended. Write the choice; how you weigh a queue against a cache is up to you, as long as the rules hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from stage03_engine.frontend.features.data_parallel.balancing import Candidate


def choose_engine(candidates: Sequence[Candidate], prompt_blocks: int) -> int:
    """The number of the engine that gets the request.

    candidates     the engines that take requests now, at least one, in any order. Of each you may look at
        each.engine          its number. Numbers may be missing: an engine that died has left
        each.waiting         its requests that have not begun; those that were sent since its last step count as waiting
        each.running         those that are being computed
        each.cached_blocks   so many of the prompt's first blocks it should have in its cache, and need not compute
    prompt_blocks  the full blocks of the prompt

    What you may not use: clocks, random numbers, files, or anything that outlives the call.
    """
    raise NotImplementedError
