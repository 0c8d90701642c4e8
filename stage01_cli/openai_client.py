"""`stages chat` and `stages complete`: talk to a running server (vllm/entrypoints/cli/openai.py)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stage01_cli.types import CLISubcommand
from stage03_engine.args.fields import parse_int
from stage03_engine.errors import StagesError

if TYPE_CHECKING:
    from openai import APIError, OpenAI
    from openai.types.chat import ChatCompletionMessageParam

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 600.0  # between two chunks: a long queue is no error


class ServerError(StagesError):
    """The server could not be reached, or refused."""


class RefusedError(ServerError):
    """The server refused this request; the next one may go well."""


def _add_client_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://localhost:8000/v1", help="address of the server's API (default: %(default)s)"
    )
    parser.add_argument("--model-name", metavar="NAME", help="model to ask; the server's first if not given")
    parser.add_argument("--api-key", metavar="KEY", help="key to send; OPENAI_API_KEY if not given")


def _connect(args: argparse.Namespace) -> tuple[OpenAI, str]:
    """(client, model name). Raises ServerError."""
    from openai import OpenAI, Timeout

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
        raise RefusedError(f"the server at {url} answered {error.status_code}: {_reason(error)}") from None
    except openai.APIError as error:  # an error object in the middle of a stream
        raise RefusedError(f"the server at {url} reported an error: {_reason(error)}") from None
    except Exception as error:
        # The client lets errors of its HTTP library through when a stream breaks or a URL is impossible. Whether that is
        # httpx or its successor depends on the client's version, so its classes are known by their home, not by import.
        if not (type(error).__module__.startswith("httpx") or isinstance(error, ValueError)):
            raise
        raise ServerError(f"no proper answer from {url}: {error}") from None


def _reason(error: APIError) -> str:
    """The message of OpenAI's error object, if the server sent one."""
    message = error.body.get("message") if isinstance(error.body, dict) else None
    return message if isinstance(message, str) else error.message


def _print_stream(pieces: Iterator[str]) -> str:
    """Print pieces of text as they come, and return the whole."""
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def _repeat(ask: Callable[[str], None]) -> int:
    """Call `ask` with each line that the user types. Ends at Ctrl-D, Ctrl-C, or when the server is gone."""
    while True:
        try:
            line = input("> ")
            if line:
                ask(line)
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        except RefusedError as error:
            print(f"stages: error: {' '.join(str(error).split())}", file=sys.stderr)


class ChatCommand(CLISubcommand):
    """A chat with a running server; it remembers what was said."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The flags of `chat`."""
        _add_client_arguments(parser)
        parser.add_argument(
            "--system-prompt", metavar="TEXT", help="first message of the chat, in the role of the system"
        )
        parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer, exit")

    def cmd(self, args: argparse.Namespace) -> int:
        """Chat until the user ends it. Raises ServerError."""
        client, model = _connect(args)
        history: list[ChatCompletionMessageParam] = []
        if args.system_prompt is not None:
            history.append({"role": "system", "content": args.system_prompt})

        def ask(message: str) -> None:
            history.append({"role": "user", "content": message})
            try:
                with _errors(args.url):
                    answer = _print_stream(_chat_pieces(client, model, history))
            except BaseException:
                history.pop()  # no answer: the chat goes on as if the message had not been sent
                raise
            history.append({"role": "assistant", "content": answer})

        if args.quick is None:
            return _repeat(ask)
        ask(args.quick)
        return 0


def _chat_pieces(client: OpenAI, model: str, history: list[ChatCompletionMessageParam]) -> Iterator[str]:
    with client.chat.completions.create(model=model, messages=history, stream=True) as stream:
        for chunk in stream:
            if chunk.choices:
                yield chunk.choices[0].delta.content or ""


class CompleteCommand(CLISubcommand):
    """Continue each text that the user types."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The flags of `complete`."""
        _add_client_arguments(parser)
        parser.add_argument(
            "--max-tokens",
            type=_tokens,
            metavar="INT",
            help="most tokens per answer; the server's default if not given",
        )
        parser.add_argument("-q", "--quick", metavar="TEXT", help="continue one text, print the result, exit")

    def cmd(self, args: argparse.Namespace) -> int:
        """Complete until the user ends it. Raises ServerError."""
        client, model = _connect(args)

        def ask(prompt: str) -> None:
            with _errors(args.url):
                _print_stream(_completion_pieces(client, model, prompt, args.max_tokens))

        if args.quick is None:
            return _repeat(ask)
        ask(args.quick)
        return 0


def _completion_pieces(client: OpenAI, model: str, prompt: str, max_tokens: int | None) -> Iterator[str]:
    with client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, stream=True) as stream:
        for chunk in stream:
            if chunk.choices:
                yield chunk.choices[0].text


def _tokens(text: str) -> int:
    try:
        value = parse_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
