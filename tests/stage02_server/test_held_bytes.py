"""What is held of one thing, against a list of who holds what: rooms, halves, and holds that pass from hand to hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from stage02_server.errors import APIError
from stage02_server.features.held_bytes import held
from stage02_server.features.held_bytes.held import HeldBytes, Hold

MOST = 100
ASKERS = ("", None, "10.0.0.1", "10.0.0.2", 7)


class Owner:
    """A request that dies when a test lets go of it."""


ACTION = st.tuples(
    st.sampled_from(["hold", "become", "pass on", "leave the block", "leave it by an error", "the owner goes"]),
    st.integers(0, 5),
    st.integers(0, MOST + 5),
    st.sampled_from(ASKERS),
)


def fits(size: int, asker: Any, others: list[tuple[Any, int]]) -> bool:
    """In words: nobody has more than there is, and whoever may be told from others no more than half, unless it has nothing else."""
    own = sum(each for who, each in others if who == asker)
    if size + sum(each for _, each in others) > MOST:
        return False
    return not own or asker in ("", None) or own + size <= MOST // 2


@given(st.lists(ACTION, max_size=40))
def test_what_is_held_is_what_a_list_says(actions: list[Any]) -> None:
    whose: list[Any] = [""]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held, "find", lambda *_: lambda: whose[0])
        counted = HeldBytes("things", MOST, "--most")
    holds: list[list[Any]] = []  # [hold, asker, size, owner]
    for action, number, size, asker in actions:
        if action == "hold":
            whose[0], new = asker, [None, asker, 0, None]
            holds.append(new)
            change(new, size, holds, counted)
        elif holds and (mine := holds[number % len(holds)])[0] is not None:
            if action == "become":
                change(mine, size, holds, counted)
            elif action == "pass on":
                mine[0].pass_on(owner := Owner())
                mine[3] = owner
                del owner
            elif action == "the owner goes":
                if mine[3] is not None:
                    mine[2], mine[3] = 0, None
            elif mine[3] is None:  # passed on, it outlives its block
                leave(mine[0], action == "leave it by an error")
                mine[2] = 0
            else:
                leave(mine[0], action == "leave it by an error")
        assert counted.number == sum(each[2] for each in holds)


def leave(hold: Hold, by_an_error: bool) -> None:
    try:
        with hold:
            if by_an_error:
                raise ValueError
    except ValueError:
        assert by_an_error


def change(mine: list[Any], size: int, holds: list[list[Any]], counted: HeldBytes) -> None:
    """Take a hold, or change it, and see that it is refused when a list says so."""
    others = [(each[1], each[2]) for each in holds if each is not mine]
    allowed, refused = size == 0 or fits(size, mine[1], others), False
    try:
        if mine[0] is None:
            mine[0] = counted.hold(size)
        else:
            mine[0].become(size)
    except APIError as error:
        refused = error.status == 429
    assert refused != allowed, (size, mine[1], others)
    mine[2] = 0 if refused else size
