"""A recording as one HTML page that plays it: no network, no kernel, nothing to install.

`page(recording)` is the page as text, `show(recording)` puts it into a notebook; both take a second recording to compare with.
In reading order: data.py (what the page holds of a recording), build.py (how the page is put together), replay.js (events ->
state), panels.js and details.js (state -> picture), controls.js (time, keys and mouse).
"""

from stagetrace.player.build import Player, page, show
from stagetrace.player.data import MAX_EVENTS

__all__ = ["MAX_EVENTS", "Player", "page", "show"]
