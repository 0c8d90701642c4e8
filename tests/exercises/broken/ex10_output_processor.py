"""Of the output processor."""

from __future__ import annotations

from broken import broken

OUT, LOG = "output_processor", "logprobs.answer"
_NEW = "            new = new[: self.detokenizer.num_tokens - len(self.token_ids)]\n"
_ABORT = "                if finish_reason is None:\n                    reqs_to_abort.append(output.request_id)\n"
_INTERVAL = "        if not finished and self._num_given and len(self.token_ids) < self._num_given + self._stream_interval:\n            return None\n"
_NO_TEXT = "        if delta and not finished and not text:\n            return None  # its tokens and logprobs go out with their text\n"
_WAKE = "        if self._ready is not None and not self._ready.done():\n            self._ready.set_result(None)\n"
_PUT = "        elif not isinstance(self._output, Exception):\n            self._output = output\n"
_ADD = "            self._output.add(output, self._aggregate)\n"
_GONE = "            if state is None:\n                continue\n"
_TAKE = "        output, self._output = self._output, None\n"

BROKEN = [
    broken(
        "lists",
        "the others begin after the chosen one",
        (
            "position.token_ids[: 1 + num_top], position.logprobs)",
            "position.token_ids[1 : 1 + num_top], position.logprobs[1:])",
        ),
        module=LOG,
    ),
    broken("lists", "one other too few", ("[: 1 + num_top]", "[: max(1, num_top)]"), module=LOG),
    broken(
        "lists",
        "offsets of the list",
        ("result.text_offset.append(offset)", "result.text_offset.append(len(result.tokens))"),
        module=LOG,
    ),
    broken("lists", "texts where ids are asked for", ("if as_ids else texts", "if False else texts"), module=LOG),
    broken("finite", "of the chosen one", ("finite(position.logprobs[0])", "position.logprobs[0]"), module=LOG),
    broken("finite", "of the others", (": finite(logprob) for", ": logprob for"), module=LOG),
    broken("counted", "all of the step", (_NEW, "            pass\n"), module=OUT),
    broken(
        "counted",
        "log-probabilities of all",
        ("self.logprobs.extend(output.new_logprobs[: len(new)])", "self.logprobs.extend(output.new_logprobs)"),
        module=OUT,
    ),
    broken(
        "ends",
        "how many of the answer",
        (
            "OutputEnd(len(new), FinishReason.STOP, stop)",
            "OutputEnd(self.detokenizer.num_tokens, FinishReason.STOP, stop)",
        ),
        module=OUT,
    ),
    broken(
        "ends",
        "by its length",
        ("OutputEnd(len(new), FinishReason.STOP, stop)", "OutputEnd(len(new), FinishReason.LENGTH, stop)"),
        module=OUT,
    ),
    broken(
        "cumulative",
        "a stop token is a stop string",
        (
            "        by_token = output.finish_reason == FinishReason.STOP and not output.ends_with_text\n",
            "        by_token = False\n",
        ),
        module=OUT,
    ),
    broken(
        "sum",
        "with those that do not count",
        ("for entry in output.new_logprobs[: len(new)])", "for entry in output.new_logprobs)"),
        module=OUT,
    ),
    broken(
        "sum", "of the newest step", ("self.cumulative_logprob += sum(", "self.cumulative_logprob = sum("), module=OUT
    ),
    broken(
        "newest",
        "the first result",
        ("        self.result = output.result\n", "        self.result = self.result or output.result\n"),
        module=OUT,
    ),
    broken(
        "newest",
        "cached tokens of the first step",
        (
            "        self.num_cached_tokens = output.num_cached_tokens\n",
            "        self.num_cached_tokens = self.num_cached_tokens or (output.num_cached_tokens if not self.token_ids[len(new) :] else 0)\n",
        ),
        module=OUT,
    ),
    broken(
        "final_only",
        "also before",
        ("        if kind == RequestOutputKind.FINAL_ONLY and not finished:\n            return None\n", ""),
        module=OUT,
    ),
    broken("interval", "is always one", (_INTERVAL, ""), module=OUT),
    broken(
        "interval",
        "also before the first output",
        (" and self._num_given and len(self.token_ids)", " and len(self.token_ids)"),
        module=OUT,
    ),
    broken(
        "interval",
        "also at the end",
        ("        if not finished and self._num_given and len", "        if self._num_given and len"),
        module=OUT,
    ),
    broken("waits", "an empty delta is sent", (_NO_TEXT, ""), module=OUT),
    broken("waits", "also at the end", (_NO_TEXT, _NO_TEXT.replace(" and not finished", "")), module=OUT),
    broken(
        "together",
        "tokens of the newest step alone",
        (
            _NO_TEXT,
            _NO_TEXT.replace(
                "            return None", "            self._num_given = len(self.token_ids)\n            return None"
            ),
        ),
        module=OUT,
    ),
    broken(
        "together",
        "all log-probabilities each time",
        ("None if self.logprobs is None else self.logprobs[start:]", "self.logprobs"),
        module=OUT,
    ),
    broken(
        "cumulative",
        "the text since the last output",
        ("text = self.detokenizer.next_text(delta)", "text = self.detokenizer.next_text(True)"),
        module=OUT,
    ),
    broken(
        "cumulative",
        "the tokens since the last output",
        ("        start = self._num_given if delta else 0\n", "        start = self._num_given\n"),
        module=OUT,
    ),
    broken(
        "abort",
        "what the engine has ended in the same step",
        (_ABORT, "                reqs_to_abort.append(output.request_id)\n"),
        module=OUT,
    ),
    broken("abort", "never", (_ABORT, ""), module=OUT),
    broken(
        "own_queue",
        "to whoever is first",
        (
            "                state.queue.put(made)\n",
            "                next(iter([*self.request_states.values(), state])).queue.put(made)\n",
        ),
        module=OUT,
    ),
    broken("merged", "the newer delta replaces the older", (_ADD, "            self._output = output\n"), module=OUT),
    broken("merged", "always appended", (_ADD, "            self._output.add(output, True)\n"), module=OUT),
    broken(
        "exception",
        "is lost behind an output",
        (_PUT, "        elif self._output is None:\n            self._output = output\n"),
        module=OUT,
    ),
    broken(
        "exception", "an output replaces it", (_PUT, "        else:\n            self._output = output\n"), module=OUT
    ),
    broken(
        "exception",
        "is returned",
        (
            "        if isinstance(output, Exception):\n            raise output\n        return output\n\n\nclass _Returned",
            "        return output\n\n\nclass _Returned",
        ),
        module=OUT,
    ),
    broken(
        "exception",
        "wakes nobody",
        (
            _WAKE,
            _WAKE.replace(
                "if self._ready is not None", "if isinstance(output, RequestOutput) and self._ready is not None"
            ),
        ),
        module=OUT,
    ),
    broken("wakes", "nobody", (_WAKE, ""), module=OUT),
    broken("wakes", "does not take it", (_TAKE, "        output = self._output\n"), module=OUT),
    broken(
        "told",
        "not of outputs",
        ("        if trace.on and isinstance(output, RequestOutput):\n", "        if False:\n"),
        module=OUT,
    ),
    broken(
        "told",
        "only of steps with new text",
        (
            "        if trace.on:\n            characters = ",
            "        if trace.on and self.detokenizer.safe > shown:\n            characters = ",
        ),
        module=OUT,
    ),
]
