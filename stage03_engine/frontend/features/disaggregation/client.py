"""The client of engines of which some compute prompts and others go on with them (vLLM: a proxy in front of two servers).

A request goes to a prefill engine first, which ends it with its first token and says where its blocks are; then to a decode engine, which fetches them. One
that a decode engine has nearly all of goes straight there. The client passes on what the decode engine says. An engine that dies costs time: another one of its kind takes over, a decode engine computes
the prompt itself if there is no prefill engine, and a prefill engine does all of it if there is no decode engine.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, NamedTuple

import msgspec

from stage03_engine.args.processes import private_folder
from stage03_engine.config import VllmConfig
from stage03_engine.errors import EngineDeadError
from stage03_engine.frontend.core_client import AsyncEngineCoreClient
from stage03_engine.frontend.features.data_parallel.balancing import Balancer, Choice
from stage03_engine.frontend.features.data_parallel.client import DPLBAsyncMPClient, ScalingError
from stage03_engine.frontend.features.data_parallel.engine import DPAsyncMPClient, Engine, MakeEngine
from stage03_engine.frontend.features.data_parallel.in_flight import InFlight
from stage03_engine.frontend.features.data_parallel.prefix_index import PrefixIndex
from stage03_engine.frontend.features.disaggregation.roles import Roles
from stage03_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from stagetrace import trace

logger = logging.getLogger(__name__)
PARAMS = "kv_transfer_params"


class Kept(NamedTuple):
    """What a prefill engine said about a request's blocks."""

    client: AsyncEngineCoreClient  # of that engine, as it was: one that is started again has none of them
    engine: int
    params: dict[str, Any]


class TwoSides(Balancer):
    """A balancer for each role."""

    def __init__(self, prefill: Balancer, decode: Balancer, roles: Roles) -> None:
        super().__init__()
        self.prefill, self.decode, self._roles = prefill, decode, roles

    def _side(self, engine: int) -> Balancer:
        return self.prefill if self._roles.computes_prompts(engine) else self.decode

    def join(self, engine: int, num_blocks: int) -> None:
        """See Balancer."""
        side = self._side(engine)
        side.join(engine, num_blocks)
        self.loads[engine] = side.loads[engine]

    def leave(self, engine: int) -> None:
        """See Balancer."""
        self.loads.pop(engine, None)
        self.prefill.leave(engine)
        self.decode.leave(engine)

    def cache_is_empty(self, engine: int) -> None:
        """See Balancer."""
        self._side(engine).cache_is_empty(engine)

    def began(self, choice: Choice, num_cached_tokens: int) -> None:
        """See Balancer."""
        self._side(choice.engine).began(choice, num_cached_tokens)

    def ended(self, choice: Choice, request: EngineCoreRequest, answer: list[int]) -> None:
        """See Balancer."""
        self._side(choice.engine).ended(choice, request, answer)


class DisaggregatedClient(DPLBAsyncMPClient):
    """Prefill engines have the first numbers."""

    def __init__(self, config: VllmConfig, make_engine: MakeEngine = DPAsyncMPClient) -> None:
        self._folder = private_folder()
        self.roles = Roles(config, self._folder.path)
        self.max_local_prefill_length: int = config.disaggregation_config.max_local_prefill_length
        logger.info("%s", self.roles)
        self._prefilling: set[str] = set()  # requests whose first token a prefill engine computes, or will
        self._kept: dict[str, Kept | None] = {}  # of requests that a prefill engine is through with; None: no block
        self._queued: dict[str, float] = {}  # seconds that they waited at a prefill engine, until the answer begins
        super().__init__(config, lambda own, index: make_engine(self.roles.of(own, index), index))

    def _new_balancer(self) -> Balancer:
        decode = Balancer(PrefixIndex.of(self._config))  # the next turn of a chat goes where the turns before it are
        self._sides = TwoSides(super()._new_balancer(), decode, self.roles)
        return self._sides

    # To an engine

    def _choose(self, request: EngineCoreRequest) -> Choice | None:
        here = self._sides.decode.look(request)
        if self._pays(request, here) and (choice := self._sides.prefill.choose(request)) is not None:
            self._prefilling.add(request.request_id)
            return choice
        if here is None:
            return self._sides.prefill.choose(request)
        self._sides.decode.take(here)
        return here

    def _pays(self, request: EngineCoreRequest, here: Choice | None) -> bool:
        """Should a prefill engine compute it for `here`? A decode engine can use only whole blocks before the last token, and only what the tokens' hashes
        stand for; and a few tokens it computes sooner than it gets them."""
        size, params, length = (
            self._config.cache_config.block_size,
            request.sampling_params,
            len(request.prompt_token_ids),
        )
        alone = getattr(params, "prompt_logprobs", None) is not None or request.task is not None
        missing = length - size * (0 if here is None else here.cached_blocks)
        pays = length > size and missing > self.max_local_prefill_length
        return pays and not alone and request.request_id not in self._kept

    def _message(self, request: EngineCoreRequest, engine: Engine) -> EngineCoreRequest:
        params, kept = request.sampling_params, self._kept.get(request.request_id)
        if request.request_id in self._prefilling:
            own = {"structured_outputs": None} if hasattr(params, "structured_outputs") else {}
            less = {"max_tokens": 1, "min_tokens": 0, PARAMS: {"do_remote_decode": True}}
            return msgspec.structs.replace(request, sampling_params=msgspec.structs.replace(params, **less | own))
        if kept is None:
            return request
        if self.roles.computes_prompts(engine.index) or not self._is_there(kept):
            self._let_go(request.request_id)
            return request
        return msgspec.structs.replace(
            request, sampling_params=msgspec.structs.replace(params, **{PARAMS: kept.params})
        )

    # From an engine

    def _received(self, engine: Engine, outputs: EngineCoreOutputs) -> None:
        if self.roles.computes_prompts(engine.index):
            outputs.outputs = [output for output in outputs.outputs if not self._is_prefilled(engine, output)]
        for output in outputs.outputs:
            if output.queued_seconds is not None:
                output.queued_seconds += self._queued.pop(output.request_id, 0.0)
        super()._received(engine, outputs)

    def _is_prefilled(self, engine: Engine, output: EngineCoreOutput) -> bool:
        """Is it of a request that goes on elsewhere? Then it does so now."""
        request_id, params = output.request_id, (output.result or {}).get(PARAMS)
        in_flight = self._requests.get(request_id)
        if in_flight is None or in_flight.engine != engine.index or request_id not in self._prefilling:
            if params is not None:  # it was aborted meanwhile
                self._release(Kept(engine.client, engine.index, params))
                return True
            return False
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            self._prefilling.discard(request_id)
            return False  # it was refused, or ended: the client hears it
        if output.finish_reason is not None:
            self._prefilling.discard(request_id)
            self._leave(engine, in_flight, output.num_cached_tokens)
            self._queued[request_id] = output.queued_seconds or 0.0
            self._kept[request_id] = None if params is None else Kept(engine.client, engine.index, params)
            if trace.on:
                trace.emit("dp.prefilled", req=request_id, engine=engine.index, is_kept=params is not None)
            self._in_background(self._go_on(in_flight))
        return True

    def _leave(self, engine: Engine, in_flight: InFlight, num_cached_tokens: int) -> None:
        choice, in_flight.choice = in_flight.choice, None
        if choice is not None:
            self._balancer.began(choice, num_cached_tokens)
            self._balancer.ended(choice, in_flight.request, [])
        engine.num_requests -= 1
        if engine.num_requests == 0:
            engine.drained.set()

    async def _go_on(self, in_flight: InFlight) -> None:
        if self._requests.get(in_flight.request.request_id) is in_flight:  # not aborted meanwhile
            await self._send(in_flight)

    # When something ends

    def _forget(self, request_id: str) -> InFlight | None:
        in_flight = super()._forget(request_id)
        self._prefilling.discard(request_id)
        self._queued.pop(request_id, None)
        if in_flight is not None and in_flight.engine is None:
            self._let_go(request_id)
        self._kept.pop(request_id, None)  # the decode engine tells the prefill engine
        return in_flight

    def _let_go(self, request_id: str) -> None:
        if (kept := self._kept.pop(request_id, None)) is not None:
            self._release(kept)

    def _is_there(self, kept: Kept) -> bool:
        engine = self._engines.get(kept.engine)
        return engine is not None and engine.is_alive and engine.client is kept.client

    def _release(self, kept: Kept) -> None:
        if self._is_there(kept):
            self._in_background(self._tell_released(kept))

    async def _tell_released(self, kept: Kept) -> None:
        with contextlib.suppress(EngineDeadError):
            await kept.client.call("release_kv_blocks", [kept.params["remote_request_id"]])

    async def _send_again(self, requests: list[InFlight]) -> None:
        """They begin again, at a prefill engine: that has their prompts in its cache."""
        for each in requests:
            self._prefilling.discard(each.request.request_id)
            self._let_go(each.request.request_id)
        await super()._send_again(requests)

    async def scale(self, size: int) -> None:
        """Raises ScalingError."""
        raise ScalingError("The number of engines is fixed by --disaggregate: start the server with another P:D.")

    def shutdown(self) -> None:
        super().shutdown()
        self._folder.remove()
