"""The process that renders chat templates: `python -m stage02_server.features.chat_template.process`.

A template comes with a model, or even with a request: it is untrusted code. Jinja's sandbox keeps it from reaching
Python's internals, but not from looping forever or building a terabyte of text. Here it harms nobody else: the operating
system ends this process when a rendering takes too long, and refuses it memory. (vLLM renders in a thread of the API process,
without limits.)

Messages both ways: length, msgpack (framing.py). First [template], answered by [error or "", content
format]. Then any number of [template or None, variables as JSON], each answered by [error or "", prompt]. The prompt ends with
the last message if the variable `continue_final_message` says so.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from stage02_server.features.chat_template.framing import read_message, write_message
from stage03_engine.args.processes import wake_as_orphan

SECONDS = 1.0  # of CPU time, for one rendering
MEMORY_BYTES = 512 * 1024**2  # of the whole process
MAX_CHARACTERS = 16 * 1024**2  # of one prompt


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter sorts the keys and escapes <, > and &.

    The arguments are those of transformers. `json.dumps` has more, such as `cls`, which would run what the template gives it.
    """
    if not isinstance(ensure_ascii, bool) or not isinstance(sort_keys, bool):
        _refuse("tojson: ensure_ascii and sort_keys must be true or false")
    if not isinstance(indent, int | str | None):
        _refuse("tojson: indent must be a number or a text")
    if separators is not None and [type(part) for part in separators] != [str, str]:
        _refuse("tojson: separators must be two texts")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Namespace(Namespace):
    """`namespace()`. What a template stores there and can be called is found by the template, as `ns.name`, and by nothing else.

    Filters and Python call methods of what they are given (`dictsort` calls `items`, `escape` calls `__html__`, `dict` calls
    `keys`): they would run the template's own function without the sandbox, which checks each call in a template.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name != "__class__" and callable(value):
            raise AttributeError(name)
        return value

    def __getitem__(self, name: str) -> Any:
        """Where the sandbox looks for what is no attribute."""
        return self._Namespace__attrs[name]


def make_environment() -> ImmutableSandboxedEnvironment:
    """What templates may use: the same names as in transformers' apply_chat_template."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now, namespace=_Namespace)
    environment.filters["tojson"] = _to_json
    return environment


def content_format(tree: nodes.Template) -> str:
    """ "openai" for a template that goes through the parts of a message's content, else "string"."""
    aliases = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }
    for loop in tree.find_all(nodes.For):
        source = loop.iter
        if _is_content(source) or (isinstance(source, nodes.Name) and source.name in aliases):
            return "openai"
    return "string"


def _is_content(node: nodes.Node) -> bool:
    """`message.content` or `message["content"]`."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _render(template: Template, variables: dict[str, Any]) -> str:
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateError(f"the prompt would have more than {MAX_CHARACTERS} characters")
        pieces.append(piece)
    prompt = "".join(pieces)
    if variables.get("continue_final_message"):
        prompt = _cut_after(prompt, variables["messages"][-1])
    prompt.encode()  # a template can spell a lone surrogate
    return prompt


def _cut_after(prompt: str, message: dict[str, Any]) -> str:
    """The prompt up to the end of the last message's text, so that the model continues it. A template may strip it.

    Takes time in proportion to the prompt. `find` guarantees that, `rfind` does not: so both texts are turned round.
    """
    content = message["content"]
    text, turned = content if isinstance(content, str) else content[-1].get("text", ""), prompt[::-1]
    for wanted in (text, text.rstrip(), text.strip()):
        if wanted.strip() and (place := turned.find(wanted[::-1])) >= 0:
            return prompt[: len(prompt) - place]
    raise TemplateError(
        "the prompt does not hold the last message's text, which continue_final_message is to continue "
        f"(role {message['role'][:50]!r})"
    )


def _words(error: Exception) -> str:
    """The error for the client: of limited length, without the address that Python shows for an object."""
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, UnicodeEncodeError):
        return "the prompt would hold a lone surrogate, which is not Unicode text"
    shown = re.sub(r" at 0x[0-9a-fA-F]+", "", str(error) or type(error).__name__)[:300]
    return shown.encode(errors="replace").decode()


def _limit_seconds(seconds: float) -> None:
    """Limit the CPU time of this process from now on; 0 lifts the limit. The signal's default action ends the process
    wherever it is, also inside one long operation of the interpreter."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> int:
    """Render until the server closes the pipe."""
    wake_as_orphan()
    requests, answers, environment = sys.stdin.buffer, sys.stdout.buffer, make_environment()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    own: Template | None = None
    try:
        while True:
            source, *variables = read_message(requests)
            _limit_seconds(SECONDS)
            try:
                template = own if source is None and own is not None else environment.from_string(source)
                if variables:
                    answer = ["", _render(template, json.loads(variables[0]))]
                else:
                    own, answer = template, ["", content_format(environment.parse(source))]
            except Exception as error:  # a template may do anything that Python can, e.g. divide by zero
                answer = [_words(error), ""]
            _limit_seconds(0)
            write_message(answers, answer)
    except EOFError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
