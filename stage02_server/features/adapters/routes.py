"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter (vllm/entrypoints/serve/lora/api_router.py)."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, Field, StrictBool, StrictInt

from stage02_server.api_server import Services
from stage02_server.errors import APIError, not_found
from stage02_server.features.adapters.folders import folder_below
from stage02_server.middleware import TENANT
from stage02_server.protocol_types import Text
from stage03_engine.errors import InvalidRequestError
from stage03_engine.frontend.features.adapters.registry import AdapterRegistry, registry_of

logger = logging.getLogger(__name__)
router = APIRouter()
Name = Annotated[Text, Field(max_length=256)]
Path = Annotated[Text, Field(max_length=4096)]
Number = Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)]


class LoadLoRAAdapterRequest(BaseModel):
    """An adapter that is to be there from now on."""

    lora_name: Name = Field(description="The name by which requests choose it, as their model.")
    lora_path: Path = Field(description="Its folder, below the one that the server was given for this.")
    load_inplace: StrictBool = Field(default=False, description="Take the place of the adapter that has this name.")


class UnloadLoRAAdapterRequest(BaseModel):
    """An adapter that is to be gone."""

    lora_name: Name = Field(description="Its name.")
    lora_int_id: Number | None = Field(default=None, description="Its number; if given, no other one is unloaded.")


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadLoRAAdapterRequest, raw_request: Request) -> Response:
    """Load an adapter into every engine. 400 if its name is taken, or it does not fit the model; 403 for a folder that is none of the
    operator's; 404 if nothing is there."""
    services, registry = _allowed(raw_request)
    try:
        registry.check(body.lora_name, body.lora_path, in_place=body.load_inplace)
    except InvalidRequestError as error:
        raise _wrong(str(error), error.param) from error
    if body.lora_name in services.models.names:
        raise _wrong(f"'{body.lora_name}' is a name of the model itself.", "lora_name")
    root = services.args.lora_root
    folder = await asyncio.to_thread(folder_below, root, body.lora_name, body.lora_path)
    await registry.changing(
        services.engine, lambda: registry.loading(body.lora_name, folder, in_place=body.load_inplace, root=root)
    )
    return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadLoRAAdapterRequest, raw_request: Request) -> Response:
    """Unload an adapter from every engine: new requests get a 404, those that run go on to their end."""
    services, registry = _allowed(raw_request)
    if not body.lora_name:
        raise _wrong("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    adapter = registry.known.get(body.lora_name)
    if adapter is None or body.lora_int_id not in (None, adapter.number):
        raise not_found(f"The lora adapter '{body.lora_name}' cannot be found.", "lora_name")
    if not await registry.changing(services.engine, lambda: registry.unloading(adapter)):  # somebody was faster
        raise not_found(f"The lora adapter '{body.lora_name}' cannot be found.", "lora_name")
    return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")


def _allowed(raw_request: Request) -> tuple[Services, AdapterRegistry]:
    """Raises APIError 403 for a key that is not the first of several: an adapter is there for all keys, and so it is the operator's."""
    services: Services = raw_request.app.state.services
    services.engine.check_health()
    if TENANT.get():
        raise APIError(403, "PermissionDeniedError", "Of several API keys only the first may load and unload adapters.")
    return services, registry_of(services.engine.input_processor)


def _wrong(message: str, param: str | None) -> APIError:
    return APIError(400, "InvalidUserInput", message, param)


def install(app: FastAPI, services: Services) -> None:
    """Add the routes, if there may be adapters."""
    if services.engine.vllm_config.lora_config.enable_lora:
        where = services.args.lora_root or "nowhere: --lora-root is not given"
        logger.warning("Clients may load and unload adapters while the server runs, from %s.", where)
        app.include_router(router)
