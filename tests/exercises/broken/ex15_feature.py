"""Of the feature."""

from __future__ import annotations

from broken import broken

_LAST = "    last = tokens[len(tokens) - n + 1 :]"
_TOKENS = "                tokens = [*row.prompt_token_ids.tolist(), *row.output_token_ids.tolist()]\n"
_BAN = '                    logits[number, banned] = float("-inf")\n'
_IS = "            if type(n) is int and n >= 1:\n"
_WAY = "                if len(banned) < logits.shape[1]:\n"
_RUNS = "    runs = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]\n"
_CHECK = "        services.models.check(request.model)\n"
_ANSWER = "        return await answer_of(in_thread_if_long([request.prompt], raw_request.receive, work))\n"

BROKEN = [
    broken(
        "forbids",
        "the last n",
        (_LAST, "    last = tokens[len(tokens) - n :]"),
        ("if tokens[i : i + n - 1] == last}", "if tokens[i : i + n] == last}"),
    ),
    broken(
        "forbids",
        "not where two overlap",
        ("for i in range(len(tokens) - n + 1) if", "for i in range(len(tokens) - 2 * n + 2) if"),
    ),
    broken("forbids", "every token that was there", ("if tokens[i : i + n - 1] == last}", "if True}")),
    broken("greedy", "not for greedy requests", ("        return False\n", "        return True\n")),
    broken("whole", "the answer alone", (_TOKENS, "                tokens = row.output_token_ids.tolist()\n")),
    broken(
        "whole or minus_inf", "the prompt alone", (_TOKENS, "                tokens = row.prompt_token_ids.tolist()\n")
    ),
    broken("minus_inf", "ten less", (_BAN, "                    logits[number, banned] -= 10\n")),
    broken("minus_inf", "and one more", (_BAN, _BAN + "                    logits[number] -= 1\n")),
    broken(
        "own_row",
        "the first row's",
        (
            "for number, row in enumerate(rows):\n            n = row",
            "for number, row in enumerate([rows[0]] * len(rows)):\n            n = row",
        ),
    ),
    broken(
        "own_row",
        "what was asked before goes on",
        (
            '            n = row.sampling_params.extra_args.get("no_repeat_ngram")\n',
            '            n = self.last = row.sampling_params.extra_args.get("no_repeat_ngram", getattr(self, "last", None))\n',
        ),
    ),
    broken("ignored", "True is 1", (_IS, "            if isinstance(n, int) and n >= 1:\n")),
    broken(
        "ignored",
        "2.0 is 2",
        (_IS, "            if isinstance(n, float) and n >= 1:\n                n = int(n)\n" + _IS),
    ),
    broken("ignored", "0 is 1", (_IS, "            if type(n) is int and n >= 0:\n                n = max(n, 1)\n")),
    broken("way_out", "none", (_WAY, "                if True:\n")),
    broken("route", "how many runs there are", ("repeats=len(runs) - len(set(runs))", "repeats=len(runs)")),
    broken(
        "route",
        "characters instead of tokens",
        ("    tokens = tokenizer.encode(text, False)\n", "    tokens = list(text)\n"),
    ),
    broken("refuses", "whatever the model is called", (_CHECK, "")),
    broken(
        "refuses",
        "a text as a number",
        ("Annotated[StrictInt, Field(ge=1, le=16)]", "Annotated[int, Field(ge=1, le=16)]"),
    ),
    broken("refuses", "0", ("Field(ge=1, le=16)", "Field(ge=0, le=16)")),
    broken(
        "beside",
        "in the place of all others",
        ('@app.post("/v1/repetition")\n', '@app.api_route("/v1/{rest:path}", methods=["GET", "POST"])\n'),
        (_ANSWER, _ANSWER + "\n    app.router.routes.insert(0, app.router.routes.pop())\n"),
    ),
    broken(
        "linear",
        "each token is tried",
        (
            _LAST,
            "    runs = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]\n    return {t for t in set(tokens) if len(tokens) >= n - 1 and [*tokens, t][-n:] in runs}\n"
            + _LAST,
        ),
    ),
    broken(
        "linear",
        "all pairs of places",
        (_LAST, "    for i in range(len(tokens)):\n        for _ in range(i):\n            pass\n" + _LAST),
    ),
    broken(
        "linear",
        "each run is counted",
        ("repeats=len(runs) - len(set(runs))", "repeats=sum(runs[:i].count(run) > 0 for i, run in enumerate(runs))"),
    ),
    broken(
        "linear",
        "a list of those that were there",
        (
            _RUNS,
            _RUNS + "    seen = []\n    for run in runs:\n        if run not in seen:\n            seen.append(run)\n",
        ),
        ("len(set(runs))", "len(seen)"),
    ),
]
