"""The request field `kv_transfer_params`, and that of the answers (vLLM: the same, as a dictionary in which each connector looks for its own keys)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, LiteralString

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from stage02_server.protocol_types import AnswerHook, RequestFields

if TYPE_CHECKING:
    from starlette.types import Receive

    from stage02_server.serving_engine import EngineRequests, OpenAIServing

PLACE_DIGITS = 16
MOST_PORT = (1 << 16) - 1


def _wrong(text: LiteralString) -> PydanticCustomError:
    return PydanticCustomError("kv_transfer_params", text)


def _place(text: str) -> str:
    if len(text) != PLACE_DIGITS or not set(text) <= set("0123456789abcdef") or int(text, 16) >= 1 << 63:
        raise _wrong("remote_request_id must be what a prefill server has answered")
    return text


class KVTransferParams(BaseModel):
    """What a router tells a prefill server (`do_remote_decode`), and what that answers for a decode server (`do_remote_prefill`). Keys that
    vLLM's routers send with null may be sent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    do_remote_decode: StrictBool | None = Field(
        default=None, description="Keep the prompt's KV-cache blocks for another server, and answer where they are."
    )
    do_remote_prefill: StrictBool | None = Field(
        default=None, description="Another server has computed the prompt: fetch its KV-cache blocks from there."
    )
    remote_engine_id: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Which engine that was; not needed here."
    )
    remote_host: Annotated[str, Field(min_length=1, max_length=255)] | None = Field(
        default=None, description="Where it listens: with the port, one of --allowed-kv-transfer-peers."
    )
    remote_port: Annotated[StrictInt, Field(ge=1, le=MOST_PORT)] | None = Field(
        default=None, description="The port that belongs to it."
    )
    remote_request_id: Annotated[str, AfterValidator(_place)] | None = Field(
        default=None, description="The place of the blocks there: a random number, known to its client only."
    )
    remote_block_ids: None = Field(default=None, description="Not needed here: blocks are found by their tokens.")

    @model_validator(mode="after")
    def _makes_sense(self) -> KVTransferParams:
        """Raises PydanticCustomError."""
        if self.do_remote_decode and self.do_remote_prefill:
            raise _wrong("do_remote_decode and do_remote_prefill exclude each other")
        if self.do_remote_prefill and None in (self.remote_host, self.remote_port, self.remote_request_id):
            raise _wrong("do_remote_prefill needs remote_host, remote_port and remote_request_id")
        return self

    def for_engine(self) -> dict[str, Any] | None:
        """The same for SamplingParams; None if nothing is asked for."""
        if self.do_remote_decode:
            return {"do_remote_decode": True}
        if not self.do_remote_prefill:
            return None
        assert self.remote_host is not None and self.remote_request_id is not None
        return {
            "do_remote_prefill": True, "remote_host": self.remote_host.lower(), "remote_port": self.remote_port,
            "remote_request_id": int(self.remote_request_id, 16),
        }  # fmt: skip


class KVTransferFields(RequestFields):
    """Of completions and chats."""

    kv_transfer_params: KVTransferParams | None = Field(
        default=None, description="For a router before a prefill server and a decode server: who computes what."
    )

    def apply(self, params: dict[str, Any]) -> None:
        """As the engine takes it."""
        if self.kv_transfer_params is not None and (given := self.kv_transfer_params.for_engine()) is not None:
            params["kv_transfer_params"] = given

    async def hook(
        self, serving: OpenAIServing, requests: EngineRequests, prompts: list[str | list[int]], receive: Receive
    ) -> AnswerHook | None:
        """Refuses what this server may not do; puts into the answer where the blocks are."""
        if self.kv_transfer_params is None or self.kv_transfer_params.for_engine() is None:
            return None
        from stage02_server.features.kv_transfer_params.links import KVTransferHook, check_link

        check_link(self.kv_transfer_params, serving, requests)
        return KVTransferHook() if self.kv_transfer_params.do_remote_decode else None


class KVTransferAnswer(BaseModel):
    """In a stream it comes with the last token."""

    kv_transfer_params: KVTransferParams | None = Field(
        default=None, description="Where the prompt's KV-cache blocks are kept, for a decode server."
    )
