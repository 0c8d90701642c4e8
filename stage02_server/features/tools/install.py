"""Tool calls and reasoning by the server's flags."""

from __future__ import annotations

from fastapi import FastAPI

from stage02_server.api_server import Services
from stage02_server.features.tools.chat_answers import ChatAnswers


def install(app: FastAPI, services: Services) -> None:
    """Parse the answers to all chats. Raises ConfigError for a parser that does not exist."""
    app.state.openai_serving_chat.parsers = ChatAnswers(services.args)
