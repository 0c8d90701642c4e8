"""Misconception: place_of is an index, and -1 is a valid one: of the last place."""

from __future__ import annotations

import numpy as np

from stage03_engine.core.features.lora.places import place_for
from stage04_kernels.features.lora import add_low_rank

__all__ = ["add_low_rank", "group_rows", "place_for"]
REJECTED = "A row without an adapter is in no group"


def group_rows(place_of):
    places = np.unique(place_of).tolist()
    if len(places) == 1:
        return [(places[0], None)]
    return [(place, np.flatnonzero(place_of == place)) for place in places]
