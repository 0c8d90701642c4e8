"""The engine behind plain function calls, `from stage03_engine.llm import LLM`, and on the command line.

What a manifest names is here: a look for a module further inside would import all of this.
"""

from stage03_engine.llm.command import run
from stage03_engine.llm.llm import LLM, AnyPrompt, Prompt

__all__ = ["LLM", "AnyPrompt", "Prompt", "run"]
