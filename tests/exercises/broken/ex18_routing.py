"""Of the router."""

from __future__ import annotations

from broken import broken

_OWN = "choose_engine"  # what is kept is kept at the function
_MOST = "    most = min(each.score for each in candidates) + MOST_BEHIND\n"
_NEAR = "    near = [each for each in candidates if each.score <= most]\n"
_MIN = "    return min(near, key=lambda each: (-each.cached_blocks, each.score, each.engine)).engine\n"


def _by(key: str, before: str = "") -> tuple[str, str]:
    """Another order of those that are near."""
    return _MIN, f"{before}    return min(near, key=lambda each: ({key}, each.engine)).engine\n"


def _behind(score: int) -> tuple[str, str]:
    return _MOST, f"    most = min(each.score for each in candidates) + {score}\n"


BROKEN = [
    broken(
        "engine",
        "the place in the list",
        (_MIN, _MIN.replace("    return ", "    return candidates.index(").replace(").engine", "))")),
    ),
    broken("engine", "the engine, not its number", (_MIN, _MIN.replace(").engine\n", ")  # type: ignore\n"))),
    broken("engine", "an engine of its own", (_MIN, _MIN.replace(").engine\n", ").engine % 2\n"))),
    broken("order", "the first of equals", (_MIN, _MIN.replace(", each.engine)", ")"))),
    broken(
        "order", "the last of equals", (_MIN, _MIN.replace(", each.engine)", ")").replace("min(near", "min(near[::-1]"))
    ),
    broken(
        "same or order",
        "equals take turns",
        _by(
            "-each.cached_blocks, each.score, (each.engine + asked) % 3",
            f"    asked = {_OWN}.asked = getattr({_OWN}, 'asked', 0) + 1\n",
        ),
    ),
    broken(
        "same or order", "a lottery among equals", _by("-each.cached_blocks, each.score, __import__('random').random()")
    ),
    broken(
        "same",
        "who comes next stays where the last one went",
        (_NEAR, f"{_NEAR}    stays = getattr({_OWN}, 'last', None)\n"),
        (
            _MIN,
            _MIN.replace("    return ", f"    {_OWN}.last = ").replace(
                "each.score, each.engine", "each.score, each.engine != stays, each.engine"
            )
            + f"    return {_OWN}.last\n",
        ),
    ),
    broken("better", "who waits is not counted", _by("-each.cached_blocks, each.running")),
    broken("better", "who runs is not counted", _by("-each.cached_blocks, each.waiting")),
    broken("better", "the busiest of equals", _by("-each.cached_blocks, -each.score")),
    broken(
        "better",
        "a quarter of the prompt is as good as none",
        _by("-(each.cached_blocks * 4 // max(1, prompt_blocks)), each.score"),
    ),
    broken("crowd", "the longest prefix, wherever it is", (_NEAR, "    near = list(candidates)\n")),
    broken(
        "crowd",
        "a block for each who waits",
        _by("8 * each.waiting + each.running - 16 * each.cached_blocks"),
        (_NEAR, "    near = list(candidates)\n"),
    ),
    broken("chats", "the least busy one", _by("each.score, -each.cached_blocks")),
    broken("chats", "nobody may wait", _behind(3)),
    broken("prompts", "one may wait", _behind(5)),
    broken("hot", "fifteen may wait", _behind(60)),
    broken("hot", "twelve may wait", _behind(50)),
    broken(
        "hidden",
        "more than two engines are too many to look at",
        _by("-each.cached_blocks * (len(candidates) < 3), each.score, -each.cached_blocks"),
    ),
]
