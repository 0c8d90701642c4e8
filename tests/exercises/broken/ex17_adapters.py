"""Of adapters in a batch."""

from __future__ import annotations

from broken import broken

LORA, PLACES = "features.lora", "lora.places"
_SORTED = "    places = np.unique(place_of[place_of != NO_PLACE]).tolist()\n"
_ALL = "    if len(places) == 1 and (place_of == places[0]).all():\n"
_ROWS = "    return [(place, np.flatnonzero(place_of == place)) for place in places]\n"
_STACKED = "    if groups.stacked is not None:\n"
_OWN = "        own = (x if rows is None else x[rows]).to(a.dtype)\n"
_MORE = "        more = ((own @ a[place].T) @ b[place].T).to(y.dtype)\n"
_ADD = "        y = y.add_(more) if rows is None else y.index_add_(0, rows, more)\n"
_FREE = "        return min(set(range(num_places)) - set(places.values())), None\n"
_EVICTED = "    evicted = min((each for each in places if each not in in_batch), key=lambda each: each in pinned)\n"
_NEVER = (_STACKED, "    if False:\n")

BROKEN = [
    broken("groups", "the other way round", (_SORTED, _SORTED.replace(".tolist()", ".tolist()[::-1]")), module=LORA),
    broken(
        "groups",
        "runs of rows",
        (
            _ROWS,
            _ROWS.replace("for place in places]", "for place in places for _ in range(1 + (place_of == place)[0])]"),
        ),
        module=LORA,
    ),
    broken(
        "groups",
        "the last row only",
        (_ROWS, _ROWS.replace("np.flatnonzero(place_of == place))", "np.flatnonzero(place_of == place)[-1:])")),
        module=LORA,
    ),
    broken(
        "groups",
        "from the last row",
        (_ROWS, _ROWS.replace("np.flatnonzero(place_of == place))", "np.flatnonzero(place_of == place)[::-1])")),
        module=LORA,
    ),
    broken(
        "nobody",
        "a group of their own",
        (_SORTED, "    places = np.unique(place_of).tolist()\n"),
        (_ALL, _ALL.replace("len(places) == 1", "len(places) == 1 and places[0] != NO_PLACE")),
        module=LORA,
    ),
    broken("nobody", "carried along", (_ALL, "    if len(places) == 1:\n"), module=LORA),
    broken("everybody", "their numbers", (_ALL, "    if False:\n"), module=LORA),
    broken(
        "own",
        "the first place's for all",
        _NEVER,
        (_MORE, _MORE.replace("a[place]", "a[groups.by_place[0][0]]").replace("b[place]", "b[groups.by_place[0][0]]")),
        module=LORA,
    ),
    broken(
        "own", "A of one, B of another", _NEVER, (_MORE, _MORE.replace("b[place].T", "b[place - 1].T")), module=LORA
    ),
    broken(
        "own",
        "put in the place of W x",
        _NEVER,
        (_ADD, "        y[slice(None) if rows is None else rows] = more\n"),
        module=LORA,
    ),
    broken(
        "own",
        "the first rank only",
        _NEVER,
        (_MORE, "        more = ((own @ a[place, :1].T) @ b[place][:, :1].T).to(y.dtype)\n"),
        module=LORA,
    ),
    broken(
        "alone",
        "the model's rows too",
        (_STACKED, "    y[groups.place_of == NO_PLACE] *= 1 + 2**-20\n" + _STACKED),
        module=LORA,
    ),
    broken(
        "alone",
        "rows after the batch's own",
        _NEVER,
        (
            _ADD,
            "        rows = torch.arange(len(y)) if rows is None else rows\n        y[rows] += more\n        y[groups.place_of == NO_PLACE] += more[:1] * 1e-3\n",
        ),
        module=LORA,
    ),
    broken("in_place", "a new tensor", (_STACKED, "    y = y.clone()\n" + _STACKED), module=LORA),
    broken("in_place", "x is scaled", (_STACKED, "    x.mul_(2)\n    a = a / 2\n" + _STACKED), module=LORA),
    broken(
        "in_place",
        "nothing is returned",
        (
            "        y = y.add_(more) if rows is None else y.index_add_(0, rows, more)\n    return y\n",
            "        y = y.add_(more) if rows is None else y.index_add_(0, rows, more)\n    return None\n",
        ),
        module=LORA,
    ),
    broken("formats", "that of x", (_STACKED, "    a, b = a.to(x.dtype), b.to(x.dtype)\n" + _STACKED), module=LORA),
    broken("formats", "not brought together", _NEVER, (_OWN, _OWN.replace(".to(a.dtype)", "")), module=LORA),
    broken(
        "thin",
        "B A first",
        _NEVER,
        (_MORE, "        more = (own @ (b[place] @ a[place]).T).to(y.dtype)\n"),
        module=LORA,
    ),
    broken(
        "thin",
        "all rows, and a mask",
        _NEVER,
        (_OWN, "        own = x.to(a.dtype)\n"),
        (
            _ADD,
            "        y = y.add_(more if rows is None else more * torch.tensor(groups.place_of == place)[:, None])\n",
        ),
        module=LORA,
    ),
    broken(
        "grouped",
        "row after row",
        _NEVER,
        (
            _OWN + _MORE + _ADD,
            "        for row in range(len(x)) if rows is None else rows.tolist():\n            y[row] += ((x[row].to(a.dtype) @ a[place].T) @ b[place].T).to(y.dtype)\n",
        ),
        module=LORA,
    ),
    broken("free", "the highest", (_FREE, _FREE.replace("min(", "max(")), module=PLACES),
    broken(
        "free",
        "somebody leaves although",
        (
            "    if len(places) < num_places:\n",
            "    if len(places) < num_places and not (set(places) - set(in_batch)):\n",
        ),
        module=PLACES,
    ),
    broken("free", "the number of those that are taken", (_FREE, "        return len(places), None\n"), module=PLACES),
    broken(
        "oldest",
        "the newest",
        (_EVICTED, _EVICTED.replace("for each in places if", "for each in reversed(list(places)) if")),
        module=PLACES,
    ),
    broken(
        "oldest",
        "the lowest number",
        (_EVICTED, _EVICTED.replace("for each in places if", "for each in sorted(places) if")),
        module=PLACES,
    ),
    broken(
        "oldest",
        "the lowest place",
        (_EVICTED, _EVICTED.replace("for each in places if", "for each in sorted(places, key=places.get) if")),
        module=PLACES,
    ),
    broken(
        "oldest",
        "the highest number",
        (_EVICTED, _EVICTED.replace("for each in places if", "for each in sorted(places, reverse=True) if")),
        module=PLACES,
    ),
    broken(
        "batch",
        "whoever is the oldest",
        (_EVICTED, _EVICTED.replace("if each not in in_batch", "if True")),
        module=PLACES,
    ),
    broken(
        "batch",
        "if only it is not pinned",
        (_EVICTED, "    evicted = min(places, key=lambda each: (each in pinned, each in in_batch))\n"),
        module=PLACES,
    ),
    broken(
        "pinned",
        "a word that nobody heeds",
        (_EVICTED, _EVICTED.replace("key=lambda each: each in pinned", "key=lambda each: 0")),
        module=PLACES,
    ),
    broken(
        "pinned",
        "the pinned ones first",
        (_EVICTED, _EVICTED.replace("each in pinned)", "each not in pinned)")),
        module=PLACES,
    ),
]
