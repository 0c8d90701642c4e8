"""stagetrace: structured tracing for the four stages. `from stagetrace import trace`, then `if trace.on: trace.emit(...)`.

The folder around this package is called `trace/` and has no `__init__.py` on purpose: a package of that name would
shadow Python's own `trace` module.
"""

from stagetrace.event import Event
from stagetrace.filters import EventFilter
from stagetrace.ids import root_of
from stagetrace.read.reader import Recording, Run, read_run
from stagetrace.read.story import Story, tell
from stagetrace.recorder import Recorder, trace
from stagetrace.vocabulary import VOCABULARY

__all__ = [
    "VOCABULARY", "Event", "EventFilter", "Recorder", "Recording", "Run", "Story", "read_run", "root_of", "tell", "trace",
]  # fmt: skip
