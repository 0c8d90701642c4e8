"""`stages chat` and `stages complete`: talk to a running server (vllm/entrypoints/cli/openai.py)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from stage03_engine.args.command import CLISubcommand
from stage03_engine.args.fields import parse_int
from stage03_engine.args.parser import FlexibleArgumentParser
from stage03_engine.errors import StagesError
from stagetrace.terminal import complain
from stagetrace.text import printable

if TYPE_CHECKING:
    from openai import APIError, OpenAI
    from openai.types.chat import ChatCompletionMessageParam

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 600.0  # between two chunks: a long queue is not an error
RESET = "/reset"
"""What a user of `chat` types to start over."""


class ServerError(StagesError):
    """The server could not be reached, or refused."""


class RefusedError(ServerError):
    """The server refused this request; the next one may succeed."""


def _add_client_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://localhost:8000/v1", help="address of the server's API (default: %(default)s)"
    )
    parser.add_argument("--model-name", metavar="NAME", help="model to ask; the server's first if not given")
    parser.add_argument("--api-key", metavar="KEY", help="key to send; OPENAI_API_KEY if not given")
    parser.add_argument("--stats", action="store_true", help="print tokens and times on stderr after each answer")
    parser.add_argument(
        "--max-tokens", type=_tokens, metavar="INT", help="most tokens per answer; the server's default if not given"
    )


def _connect(args: argparse.Namespace) -> tuple[OpenAI, str]:
    """(client, model name). Raises ServerError."""
    from openai import OpenAI, Timeout

    if not args.url.startswith(("http://", "https://")):
        raise ServerError(f"--url {args.url} must begin with http:// or https://")
    timeout = Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    key = args.api_key or os.environ.get("OPENAI_API_KEY") or "EMPTY"  # the client refuses to start without a key
    with _errors(args.url):
        client = OpenAI(base_url=args.url, api_key=key, timeout=timeout, max_retries=0)
        if args.model_name is not None:
            return client, args.model_name
        models = client.models.list().data
    if not models:
        raise ServerError(f"the server at {args.url} serves no model")
    return client, models[0].id


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turn the client's exceptions into one line each."""
    import openai

    try:
        yield
    except openai.APIConnectionError:
        raise ServerError(f"no server at {url}; start one with: stages serve gpt2-tiny") from None
    except openai.APIStatusError as error:
        elsewhere = error.status_code == 404 and not url.rstrip("/").endswith("/v1")
        hint = f"; most servers want --url {url.rstrip('/')}/v1" if elsewhere else ""
        raise RefusedError(f"the server at {url} answered {error.status_code}: {_reason(error)}{hint}") from None
    except openai.APIError as error:  # an error object in the middle of a stream
        raise RefusedError(f"the server at {url} reported an error: {_reason(error)}") from None
    except Exception as error:
        # The client lets errors of its HTTP library through when a stream breaks or a URL is impossible. Whether that is
        # httpx or its successor depends on the client's version, so its classes are recognized by their module, not imported.
        if not (type(error).__module__.startswith("httpx") or isinstance(error, ValueError)):
            raise
        raise ServerError(f"no valid answer from {url}: {error}") from None


def _reason(error: APIError) -> str:
    """The message of OpenAI's error object, if the server sent one."""
    message = error.body.get("message") if isinstance(error.body, dict) else None
    return message if isinstance(message, str) else error.message


class Answer:
    """An answer while it streams: prints what comes, keeps the text, and measures. Ctrl-C keeps what has arrived."""

    def __init__(self) -> None:
        self.text = ""
        self._began = time.perf_counter()
        self._first: float | None = None
        self._tokens = self._prompt_tokens = 0

    def read(self, chunks: Iterable[Any], text_of: Callable[[Any], str | None]) -> None:
        """Print the text of each chunk as it comes, and a newline after the last one."""
        for chunk in chunks:
            if chunk.usage is not None:
                self._tokens, self._prompt_tokens = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
            piece = text_of(chunk.choices[0]) if chunk.choices else None
            if piece:
                self._first = self._first or time.perf_counter()
                self.text += piece
                print(piece, end="", flush=True)
        print()

    def show_stats(self, wanted: bool) -> None:
        """`12 prompt tokens, 40 output tokens, first after 0.03 s, 0.41 s in all, 105.3 tokens/s`"""
        if not wanted:
            return
        now = time.perf_counter()
        first = (self._first or now) - self._began
        rate = (self._tokens - 1) / (now - self._began - first) if self._tokens > 1 else 0.0
        print(
            f"{self._prompt_tokens} prompt tokens, {self._tokens} output tokens, first after {first:.2f} s, "
            f"{now - self._began:.2f} s in all, {rate:.1f} tokens/s",
            file=sys.stderr,
        )


def _repeat(ask: Callable[[str], None]) -> int:
    """Call `ask` with each line that the user types. Ends at Ctrl-D, at Ctrl-C while it waits for a line, or when the
    server is gone; Ctrl-C during an answer ends that answer."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - from now on input() has cursor keys and a history
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        try:
            if line.strip():
                ask(line)
        except KeyboardInterrupt:
            print()
        except RefusedError as error:
            complain("stages", printable(" ".join(str(error).split())))


class ChatCommand(CLISubcommand):
    """A chat with a running server; it remembers what was said, until the user types /reset."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """The flags of `chat`."""
        parser.epilog = "/reset makes the chat forget what was said; Ctrl-C ends an answer or, at the prompt, the chat."
        _add_client_arguments(parser)
        parser.add_argument("--system-prompt", metavar="TEXT", help="system message that the chat begins with")
        parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer, exit")

    def cmd(self, args: argparse.Namespace) -> int:
        """Chat until the user ends it. Raises ServerError."""
        client, model = _connect(args)
        history: list[ChatCompletionMessageParam] = []
        if args.system_prompt is not None:
            history.append({"role": "system", "content": args.system_prompt})
        beginning = len(history)

        def ask(message: str) -> None:
            if message == RESET:
                del history[beginning:]
                return
            history.append({"role": "user", "content": message})
            answer = Answer()
            try:
                with _errors(args.url), _chat_chunks(client, model, history, args) as chunks:
                    answer.read(chunks, lambda choice: choice.delta.content)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and answer.text:  # the user has seen enough of it
                    history.append({"role": "assistant", "content": answer.text})
                else:
                    history.pop()  # no answer: the chat goes on as if the message had not been sent
                if isinstance(error, RefusedError) and "context length" in str(error) and len(history) > beginning:
                    raise RefusedError(f"{error} {RESET} makes this chat forget what was said.") from None
                raise
            history.append({"role": "assistant", "content": answer.text})
            answer.show_stats(args.stats)

        if args.quick is None:
            return _repeat(ask)
        ask(args.quick)
        return 0


def _chat_chunks(
    client: OpenAI, model: str, history: list[ChatCompletionMessageParam], args: argparse.Namespace
) -> Any:
    return client.chat.completions.create(model=model, messages=history, stream=True, **_asked_for(args))


class CompleteCommand(CLISubcommand):
    """Continue each text that the user types."""

    def add_arguments(self, parser: FlexibleArgumentParser) -> None:
        """The flags of `complete`."""
        _add_client_arguments(parser)
        parser.add_argument("-q", "--quick", metavar="TEXT", help="continue one text, print the result, exit")

    def cmd(self, args: argparse.Namespace) -> int:
        """Complete until the user ends it. Raises ServerError."""
        client, model = _connect(args)

        def ask(prompt: str) -> None:
            answer = Answer()
            with _errors(args.url), _completion_chunks(client, model, prompt, args) as chunks:
                answer.read(chunks, lambda choice: choice.text)
            answer.show_stats(args.stats)

        if args.quick is None:
            return _repeat(ask)
        ask(args.quick)
        return 0


def _completion_chunks(client: OpenAI, model: str, prompt: str, args: argparse.Namespace) -> Any:
    return client.completions.create(model=model, prompt=prompt, stream=True, **_asked_for(args))


def _asked_for(args: argparse.Namespace) -> Any:
    """The fields that flags ask for; without a flag the field is left out."""
    fields: Any = {"stream_options": {"include_usage": True}} if args.stats else {}
    return fields | ({} if args.max_tokens is None else {"max_tokens": args.max_tokens})


def _tokens(text: str) -> int:
    try:
        value = parse_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
