"""Of the settings."""

from __future__ import annotations

from broken import broken

FIELDS, PARSER, RESOLVE = "args.fields", "args.parser", "args.resolve"
_WHOLE = '    if value != value.to_integral_value() or ("." in number and not suffix.islower()):\n'
_BARE = '        if word == "--":\n            return result + list(args[position:])\n'
_GIVEN = '    if name in given:\n        return Resolved(accepted(setting, given[name], setting.flag), "command line", setting.flag)\n'
_ENV = "    if text or (setting.protects and setting.variable in environ):\n"
_OPEN = '        if resolved[name].value in (None, "auto"):\n'

BROKEN = [
    broken(
        "number",
        "through a float",
        (
            "    value = Decimal(number) * _SUFFIXES[suffix]\n",
            "    value = Decimal(float(number) * _SUFFIXES[suffix])\n",
        ),
        module=FIELDS,
    ),
    broken("number", "K is 1000", ("_SUFFIXES[suffix]\n", "_SUFFIXES[suffix.lower()]\n"), module=FIELDS),
    broken("fraction", "with any suffix", (_WHOLE, "    if value != value.to_integral_value():\n"), module=FIELDS),
    broken(
        "fraction", "is rounded", (_WHOLE, _WHOLE.replace("value != value.to_integral_value() or ", "")), module=FIELDS
    ),
    broken(
        "refused",
        "what int() takes is taken",
        ("    if match is None:\n        raise", "    if match is None:\n        return int(text)\n        raise"),
        module=FIELDS,
    ),
    broken(
        "dashes",
        "also in values",
        ('word = flag.replace("_", "-") + dot + keys + equals + value', 'word = word.replace("_", "-")'),
        module=PARSER,
    ),
    broken(
        "dashes",
        "also in keys",
        ("dot + keys + equals + value", 'dot + keys.replace("_", "-") + equals + value'),
        module=PARSER,
    ),
    broken("dashes", "also behind a bare --", (_BARE, ""), module=PARSER),
    broken("near", "however far", ("cutoff=0.6)", "cutoff=0.0)"), module=PARSER),
    broken("near", "whether it works or not", ("if close and works(close[0]) else", "if close else"), module=PARSER),
    broken(
        "order",
        "the environment decides first",
        (_GIVEN, ""),
        (
            '        return Resolved(value, "environment", setting.variable)\n',
            '        return Resolved(value, "environment", setting.variable)\n' + _GIVEN,
        ),
        module=RESOLVE,
    ),
    broken(
        "named", "0 is as good as nothing", ("    if name in given:\n", "    if given.get(name):\n"), module=RESOLVE
    ),
    broken(
        "named or blame",
        "none in the file is as good as nothing",
        ("    if name in from_file:\n", "    if from_file.get(name) is not None:\n"),
        module=RESOLVE,
    ),
    broken(
        "typed",
        "a variable stays a text",
        (
            '        value = accepted(setting, text, f"environment variable {setting.variable}")\n',
            '        accepted(setting, text, f"environment variable {setting.variable}")\n        value = text\n',
        ),
        module=RESOLVE,
    ),
    broken(
        "typed",
        "what the file says is taken as it is",
        (
            '        value = accepted(setting, from_file[name], f"config file {config_file}: {name}")\n',
            '        accepted(setting, from_file[name], f"config file {config_file}: {name}")\n        value = from_file[name]\n',
        ),
        module=RESOLVE,
    ),
    broken(
        "origin",
        "nobody is named",
        ('return Resolved(value, "environment", setting.variable)', 'return Resolved(value, "environment")'),
        module=RESOLVE,
    ),
    broken(
        "origin",
        "the setting instead of the file",
        ('return Resolved(value, "config file", config_file)', 'return Resolved(value, "config file", name)'),
        module=RESOLVE,
    ),
    broken(
        "blame",
        "the setting instead of the flag",
        ("accepted(setting, given[name], setting.flag)", "accepted(setting, given[name], name)"),
        module=RESOLVE,
    ),
    broken(
        "blame",
        "the file without its key",
        ('f"config file {config_file}: {name}"', 'f"config file {config_file}"'),
        module=RESOLVE,
    ),
    broken("open", "always", (_OPEN, "        if True:\n"), module=RESOLVE),
    broken(
        "open",
        "0 is open",
        (_OPEN, '        if not resolved[name].value or resolved[name].value == "auto":\n'),
        module=RESOLVE,
    ),
    broken("open", "auto is decided", (_OPEN, "        if resolved[name].value is None:\n"), module=RESOLVE),
]
