"""llguidance, which compiles grammars and finds the tokens that may come next (vllm/v1/structured_output/backend_guidance.py).

Only this module and grammar_checker.py load it, when the first request with a grammar comes.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import msgspec

from stage03_engine.grammar.vocabulary import Vocabulary

# Work units, not seconds; the slowest step that uses up its fuel took some 20 ms with GPT-2's vocabulary.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 100_000,
    "max_items_in_row": 20_000,  # an object with 500 optional properties needs 2,007
    "max_lexer_states": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}


class GrammarState(msgspec.Struct):
    """A request's position in its grammar. `mask` has a bit for each token id, lowest bit first, in little-endian words of
    32: 1 = may come next. It is empty if the output is `complete` or has `failed`, which says why."""

    mask: bytes
    complete: bool = False
    failed: str = ""


STUCK = "and the request's other settings together leave no token that may come next"
NO_TEXT = "matches no text at all, or only the empty one"


class Guidance:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self.eos_token_id = vocabulary.eos_token_id
        self.has_eos = self.eos_token_id < vocab_size
        self.num_mask_bytes = (vocab_size + 31) // 32 * 4
        self._tokenizer = LLTokenizer(vocabulary)  # type: ignore[arg-type]  # it has what that class has
        self.nothing = LLMatcher(self._tokenizer, "", log_level=0)  # in an error state: it accepts no token
        self._local = threading.local()

    def compile(self, lark: str) -> Any:
        """An `LLMatcher` at the start of the grammar, to be copied. Raises ValueError with what is wrong."""
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._tokenizer, lark, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            raise ValueError(_describe(matcher.get_error()))
        return matcher

    @property
    def executor(self) -> Any:
        """One for each thread that asks, so that no thread waits for what another gives it to do."""
        from llguidance import LLExecutor

        if not hasattr(self._local, "executor"):
            self._local.executor = LLExecutor(1)
        return self._local.executor


class Matcher:
    """One request's way through a grammar.

    Invariant: whatever may take long, or wait for another request with the same grammar (they share a lexer and its lock), releases
    the interpreter lock. Of an `LLMatcher` only compiling and masks do; so no token is validated, and `is_accepting` not asked.
    """

    def __init__(self, backend: Guidance, compiled: Any, ignore_eos: bool) -> None:
        self._backend, self._matcher, self._nothing = backend, compiled.deep_copy(), backend.nothing.deep_copy()
        self._ignore_eos = ignore_eos or not backend.has_eos

    def start(self) -> GrammarState:
        """The state before the first token."""
        state = self._state()
        return state if state.mask or state.failed not in ("", STUCK) else GrammarState(b"", failed=NO_TEXT)

    def accept(self, token_ids: list[int]) -> GrammarState:
        """Move on by the tokens that were sampled."""
        if not all(self._consume(token_id) for token_id in token_ids):
            return GrammarState(b"", failed=_failure(self._matcher))
        return GrammarState(b"", complete=True) if token_ids[-1:] == [self._backend.eos_token_id] else self._state()

    def _consume(self, token_id: int) -> bool:
        """False if the grammar does not allow the token. The executor releases the interpreter lock only for two matchers at once."""
        both = [(self._matcher, token_id), (self._nothing, token_id)]
        consumed: bool = self._backend.executor.consume_token_par(both)[0]
        return consumed

    def _state(self) -> GrammarState:
        """Invariant: a mask that is handed out allows at least one token."""
        mask, eos = bytearray(self._matcher.compute_bitmask()), self._backend.eos_token_id
        if self._matcher.is_error():
            return GrammarState(b"", failed=_failure(self._matcher))
        with_eos = bytes(mask[: self._backend.num_mask_bytes])
        accepting = bool(mask[eos // 8] >> eos % 8 & 1)
        mask[eos // 8] &= ~(1 << eos % 8)
        del mask[self._backend.num_mask_bytes :]
        if mask == bytes(len(mask)):
            return GrammarState(b"", complete=accepting, failed="" if accepting else STUCK)
        return GrammarState(bytes(mask) if self._ignore_eos else with_eos)


def _failure(matcher: Any) -> str:
    error = matcher.get_error()
    # Nothing that the grammar allows can be completed; or something else allows a token that the grammar does not.
    if error.startswith("NoExtension") or "doesn't satisfy the grammar" in error:
        return STUCK
    return f"is too complex: {_describe(error)}"


def _describe(error: str) -> str:
    """The part of llguidance's message that says what is wrong, without the grammar that it quotes."""
    if error.startswith("panic"):
        return "the grammar compiler failed"
    text = re.sub(r"^(at )?\d+\(\d+\): ", "", error).removeprefix("failed to compile JSON schema: ")
    if "regex parse error" in text or text.startswith("invalid regex"):
        reason = (
            text.rpartition("error: ")[2]
            if "\nerror: " in text
            else text.partition("(in regex): ")[2].partition(";")[0]
        )
        text = f"is not a valid regular expression: {reason}"
    else:
        text = text if error.startswith("lexer error") else f"cannot be used as a grammar: {text}"
    return text.split("\n", 1)[0][:160].rstrip(". ")
