"""Each of several API keys is a tenant: no other key can find out what it asked (in vLLM all keys are one tenant).

The number of the key is in `TENANT` while its request is served, and in all tasks that the request starts. It separates the
stores of answers, and here it separates what the engine caches, and says who owns a running request.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Sequence

from fastapi import FastAPI

from stage02_server.api_server import Services
from stage02_server.features.hardening.turns import TurnsByKey
from stage02_server.middleware import TENANT
from stage03_engine.frontend.async_llm import AsyncLLM
from stage03_engine.messages import EngineCoreRequest

SPARE = 256  # owners of ended requests that may be kept before they are looked through


class Tenants:
    """Sees every request on its way to the engine core.

    Unless the prefix cache is shared, the salt of the request begins with one of its key, which is random and of one length:
    no `cache_salt` of another key makes the same one.
    """

    def __init__(self, engine: AsyncLLM, keys: Sequence[str], shared_prefix_cache: bool) -> None:
        self._engine, self._keys = engine, keys
        self._salts = None if shared_prefix_cache else [secrets.token_hex(16) for _ in keys]
        self._owners: dict[str, int | None] = {}  # request -> its key

    def share_salts(self, secret: str) -> None:
        """Servers that call this with the same secret give each key the same salt, in whatever order they know the keys: what one has
        cached for a key, all find for it."""
        if self._salts is not None:
            digests = [hmac.new(secret.encode(), key.encode(), hashlib.sha256) for key in self._keys]
            self._salts = [digest.hexdigest()[:32] for digest in digests]

    def send(self, request: EngineCoreRequest) -> None:
        """Note whose the request is, also in it, and salt it."""
        tenant, running = TENANT.get(), self._engine.output_processor.external_req_ids
        if len(self._owners) > 2 * len(running) + SPARE:
            self._owners = {request_id: self._owners.get(request_id) for request_id in running}
        self._owners[request.request_id] = request.tenant = tenant
        if self._salts is not None:
            # What no key asked for finds nothing and leaves nothing that could be found.
            own = secrets.token_hex(16) if tenant is None else self._salts[tenant]
            request.cache_salt = own + (request.cache_salt or "")

    def owns(self, request_id: str) -> bool:
        """Does this running request belong to the key that is asking?"""
        return self._owners.get(request_id) == TENANT.get()


def install(app: FastAPI, services: Services) -> None:
    """With more than one key, see every request, and have the keys take turns where threads work for them."""
    keys = list(dict.fromkeys(services.args.api_key or ()))  # in the order of their numbers
    if len(keys) > 1:
        app.state.tenants = tenants = Tenants(services.engine, keys, services.args.shared_prefix_cache)
        if (seed := services.engine.vllm_config.cache_config.prefix_caching_hash_seed) is not None:
            tenants.share_salts(seed)  # what a key has cached elsewhere, or before, it finds
        services.engine.outgoing.append(tenants.send)
        asyncio.get_running_loop().set_default_executor(TurnsByKey())  # what `asyncio.to_thread` does is somebody's too
