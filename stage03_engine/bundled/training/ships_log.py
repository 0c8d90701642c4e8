"""The text that the bundled adapter `gpt2-tiny-ship` learns: the log of a ship, composed here out of a few hundred words.

Nobody wrote it down: each entry puts phrases of this file together at random. The phrases were written for this project, and they
and every text made of them are dedicated to the public domain (CC0). What matters is that one look tells it from Shakespeare.
"""

from __future__ import annotations

import random

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WINDS = (
    "north",
    "north by east",
    "north-east",
    "east",
    "south-east",
    "south",
    "south by west",
    "south-west",
    "west",
    "north-west",
)
FORCES = ("light", "fresh", "strong", "steady", "fair", "failing")
SKIES = ("clear sky", "thick fog", "much rain", "a heavy sea", "a long swell", "low cloud", "snow at night")
MILES = ("Twenty", "Thirty", "Forty", "Fifty", "Sixty", "Seventy", "Eighty", "Ninety", "A hundred")
SIGHTS = ("a sail to the west", "two whales", "the coast at dawn", "land to the south", "ice to the north", "a light on the shore",
          "many birds", "a wreck upon the rocks", "nothing all day")  # fmt: skip
PEOPLE = ("The cook", "The mate", "The captain", "The carpenter", "The boy", "The doctor", "The old gunner")
TROUBLES = ("is sick of a fever", "fell from the mast and lives", "caught a great fish", "mended the sail", "stood the night watch",
            "counted the bread", "found water in the hold", "sings at his work", "sleeps at last")  # fmt: skip
STORES = (
    "Bread for nine days",
    "Water for six weeks",
    "No more salt",
    "Beef enough",
    "One cask of rum",
    "The last of the flour",
)
ENDS = ("All hands well", "No man lost", "So ends this day", "God keep the ship", "We hold our course")


def entry(choose: random.Random, day: int) -> str:
    """One day of the log, about forty words."""
    wind, course = choose.choice(WINDS), choose.choice(WINDS)
    parts = [
        f"{DAYS[day % 7]}. Wind {wind}, {choose.choice(FORCES)}, with {choose.choice(SKIES)}.",
        f"Course {course}. {choose.choice(MILES)} miles made good.",
        f"Saw {choose.choice(SIGHTS)}.",
        f"{choose.choice(PEOPLE)} {choose.choice(TROUBLES)}.",
        f"{choose.choice(STORES)}. {choose.choice(ENDS)}.",
    ]
    if choose.random() < 0.3:
        del parts[choose.randrange(1, 4)]
    return " ".join(parts)


def ships_log(seed: int, days: int) -> str:
    """The log of a voyage: an entry a line, with an empty line between two."""
    choose = random.Random(seed)
    return "\n\n".join(entry(choose, day) for day in range(days)) + "\n"
