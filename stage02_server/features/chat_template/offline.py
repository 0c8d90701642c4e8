"""`LLM.chat`: chats without a server (vllm/entrypoints/llm.py, LLM.chat)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pydantic import TypeAdapter, ValidationError

from stage02_server.chat_template import ChatTemplate
from stage02_server.cli_args import FrontendArgs
from stage02_server.protocol import ChatMessageParam, ChatTemplateFields
from stage03_engine.errors import InvalidRequestError
from stage03_engine.outputs import RequestOutput
from stage03_engine.plugins import find
from stage03_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from stage03_engine.llm import LLM

Messages = Sequence[dict[str, Any]]
_templates: WeakKeyDictionary[LLM, dict[tuple[str | None, ...], ChatTemplate]] = WeakKeyDictionary()
_CHAT, _FIELDS = TypeAdapter(list[ChatMessageParam]), TypeAdapter(ChatTemplateFields)


def chat(
    llm: LLM,
    messages: Messages | Sequence[Messages],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    use_tqdm: bool = False,
    lora_request: Any = None,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    **fields: Any,
) -> list[RequestOutput]:
    """Answer one chat, or several together. `chat_template` is a file or a text; `fields` are those of a request that templates see:
    `add_generation_prompt`, `continue_final_message`, `tools`, `chat_template_kwargs`. A model that sees takes parts of type `image_url`, and
    `image_pil` with a PIL.Image.Image. Raises as `LLM.generate`, and
    InvalidRequestError for messages from which no prompt can be made; ConfigError for a template that is not valid."""
    chats: Any = [messages] if messages and isinstance(messages[0], dict) else messages
    settings = {"chat_template": chat_template, "chat_template_content_format": chat_template_content_format}
    template = _template(llm, settings)
    kind = find("server", "offline_images") if any(map(_has_parts, chats)) else None
    images = None if kind is None else kind(llm)
    if images is not None:
        chats = [images.with_pillow_images(each) for each in chats]
    try:
        checked, given = [_CHAT.validate_python(each) for each in chats], _FIELDS.validate_python(fields)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise InvalidRequestError(f"{where}: {wrong['msg']}.", where) from None
    if unknown := fields.keys() - set(ChatTemplateFields.model_fields):
        raise InvalidRequestError(f"{min(unknown)} is nothing that chat() takes.", min(unknown))

    async def prompts() -> list[Any]:
        return [await prompt(each) for each in checked]

    async def prompt(chat: list[ChatMessageParam]) -> str | dict[str, Any]:
        pictures = [] if images is None else await images.load(chat)
        text = await template.apply(chat, given)
        return {"prompt": text, "multi_modal_data": {"image": pictures}} if pictures else text

    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread runs an event loop already
        made = thread.submit(asyncio.run, prompts()).result()
    special = template.adds_special_tokens(None)
    return llm.generate(made, sampling_params, use_tqdm, lora_request, add_special_tokens=special)


def _has_parts(messages: Messages) -> bool:
    return any(isinstance(each, dict) and isinstance(each.get("content"), list) for each in messages)


def _template(llm: LLM, settings: dict[str, str | None]) -> ChatTemplate:
    """Kept for the next chat: it may have a process."""
    known = _templates.setdefault(llm, {})
    key = tuple(settings.values())
    if key not in known:
        known[key] = ChatTemplate(FrontendArgs(**settings), llm.tokenizer)  # type: ignore[arg-type]
    return known[key]
