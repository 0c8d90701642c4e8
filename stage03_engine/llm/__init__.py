"""The engine behind plain function calls: `from stage03_engine.llm import LLM`."""

from stage03_engine.llm.llm import LLM, Prompt

__all__ = ["LLM", "Prompt"]
