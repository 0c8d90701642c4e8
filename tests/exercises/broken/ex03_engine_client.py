"""Of the engine's client."""

from __future__ import annotations

from broken import broken

PROCESS, CLIENT = "engine_process", "core_client"
_INIT = "EngineInit(self._config, self.input_address, self.output_address, trace.run_id)\n"
_HELLO = "            hello = self._receive(HELLO_SECONDS)\n            assert isinstance(hello, EngineHello)\n"
_SENT = "            self._handshake.send_multipart([self.identity, messages.encode(init)])\n"
_ANSWER = "            answer = self._receive()\n"
_CLOSED = "        finally:\n            self._handshake.close(linger=0)\n"
_FAILED = "            raise EngineStartError(answer.message)\n"
_SILENT = "            if time.monotonic() > deadline:\n"
_ENDED = "            if not self.alive and not self._handshake.poll(POLL_MS):\n"
_WHY = '                raise EngineStartError(f"the engine process ended during start-up with {reason}")\n'
_HWM = "        socket.set_hwm(0)"
_LINGER = "        socket.setsockopt(zmq.LINGER, 0)\n"
_BIND = "        socket.bind(address)\n"
_SOCKETS = "        inputs, self._output = bind_sockets(context, process)\n        self._input, self._context = zmq.asyncio.Socket.from_socket(inputs), context\n"
_SHAKEN = "        ready = await asyncio.to_thread(process.shake_hands)\n"
_FIRST = "        await self._input.recv_multipart()"
_BEGIN = "        self._read()\n        return ready\n"
_LOOP = "        while self._output.EVENTS & zmq.POLLIN:\n"
_NOTICE = "                self._stop_reading()\n                return self._die(error)\n"
_IS_OUTPUT = "            if outputs.utility_result is None:\n"
_PUT = "                self._outputs.put_nowait(outputs)\n"
_FIND = "            elif (call := self._calls.pop(outputs.utility_result.call_id, None)) is not None and not call.done():\n"
_SEND = "[self._process.identity, *encode_message(request_type, payload, request_id)]"
_REMEMBER = "        self._dead = error\n"
_TELL = "        self._outputs.put_nowait(error)\n"
_CALLS = "        for call in self._calls.values():\n            if not call.done():\n                call.set_exception(error)\n"
_ASK = "        if self._dead is not None:\n            raise self._dead\n"
_NEW_ID = "        call_id = next(self._call_ids)\n"
_AGAIN = "            self._outputs.put_nowait(item)  # later calls raise it again\n"
_UTILITY = "EngineCoreRequestType.UTILITY, UtilityRequest(call_id, method, args=list(args))"

BROKEN = [
    broken("hello", "twice", (_SENT, _SENT + _SENT), module=PROCESS),
    broken(
        "hello",
        "the addresses changed round",
        (_INIT, _INIT.replace("self.input_address, self.output_address", "self.output_address, self.input_address")),
        module=PROCESS,
    ),
    broken(
        "hello",
        "the settings that everybody has",
        (_INIT, _INIT.replace("self._config", "VllmConfig()")),
        module=PROCESS,
    ),
    broken("hello", "no answer", (_SENT, ""), module=PROCESS),
    broken(
        "hello",
        "the front end speaks first",
        (_SENT, ""),
        (
            _HELLO,
            "            self._handshake.send_multipart([self.identity, messages.encode(EngineInit(self._config, self.input_address, self.output_address, trace.run_id))])\n"
            + _HELLO,
        ),
        module=PROCESS,
    ),
    broken(
        "ready",
        "the hello is enough",
        ("        return answer\n", "        return EngineReady(num_gpu_blocks=0, max_model_len=0)\n"),
        module=PROCESS,
    ),
    broken(
        "ready",
        "words of its own",
        (_FAILED, '            raise EngineStartError("the engine could not start")\n'),
        module=PROCESS,
    ),
    broken(
        "ready",
        "whatever it says",
        (
            "        if isinstance(answer, EngineFailed):\n"
            + _FAILED
            + "        assert isinstance(answer, EngineReady)\n",
            "",
        ),
        module=PROCESS,
    ),
    broken(
        "ready",
        "open after a failure",
        (
            _CLOSED,
            "        finally:\n            pass\n        if isinstance(answer, EngineReady):\n            self._handshake.close(linger=0)\n",
        ),
        module=PROCESS,
    ),
    broken("ready", "open for ever", (_CLOSED, "        finally:\n            pass\n"), module=PROCESS),
    broken("ended", "its end is not looked at", (_ENDED, "            if False:\n"), module=PROCESS),
    broken("ended", "it may be silent for ever", (_SILENT, "            if False:\n"), module=PROCESS),
    broken("ended", "hello may take any time", ("self._receive(HELLO_SECONDS)", "self._receive()"), module=PROCESS),
    broken(
        "ended",
        "as a TimeoutError",
        ("                raise EngineStartError(\n", "                raise TimeoutError(\n"),
        module=PROCESS,
    ),
    broken(
        "ended",
        "without its exit code",
        (_WHY, '                raise EngineStartError("the engine process ended during start-up")\n'),
        module=PROCESS,
    ),
    broken(
        "ended",
        "waits in recv",
        ("        while not self._handshake.poll(POLL_MS):\n", "        while False:\n"),
        module=PROCESS,
    ),
    broken("words", "one look is enough", (_ENDED, "            if not self.alive:\n"), module=PROCESS),
    broken(
        "words",
        "the process first",
        (
            "        while not self._handshake.poll(POLL_MS):\n",
            "        while not (self.alive and self._handshake.poll(POLL_MS)):\n",
        ),
        (_ENDED, "            if not self.alive:\n"),
        module=PROCESS,
    ),
    broken("bound", "a limit to the queues", (_HWM, "        socket.linger  # no limit is set"), module=CLIENT),
    broken(
        "bound",
        "a limit when it is bound",
        (_HWM, "        pass"),
        (_BIND, _BIND + "        socket.set_hwm(0)\n"),
        module=CLIENT,
    ),
    broken(
        "bound", "waits when it is closed", (_LINGER, "        socket.setsockopt(zmq.LINGER, 1000)\n"), module=CLIENT
    ),
    broken(
        "bound",
        "the addresses changed round",
        (
            "(input_socket, process.input_address), (output_socket, process.output_address)",
            "(input_socket, process.output_address), (output_socket, process.input_address)",
        ),
        module=CLIENT,
    ),
    broken(
        "bound",
        "a DEALER",
        ("context.socket(zmq.ROUTER), context", "context.socket(zmq.DEALER), context"),
        module=CLIENT,
    ),
    broken("bound", "after the handshake", (_SOCKETS, ""), (_SHAKEN, _SHAKEN + _SOCKETS), module=CLIENT),
    broken("free", "shakes hands on the loop", (_SHAKEN, "        ready = process.shake_hands()\n"), module=CLIENT),
    broken(
        "free",
        "an async function is free",
        (
            _SHAKEN,
            "        async def shake():\n            return process.shake_hands()\n\n        ready = await shake()\n",
        ),
        module=CLIENT,
    ),
    broken(
        "free", "the first message is waited for in recv", (_FIRST, "        inputs.recv_multipart()"), module=CLIENT
    ),
    broken("free", "reads until something comes", (_LOOP, "        while True:\n"), module=CLIENT),
    broken("first", "nobody waits for it", (_FIRST, "        pass"), module=CLIENT),
    broken(
        "first",
        "before the handshake",
        (_SHAKEN, "        first = asyncio.ensure_future(self._input.recv_multipart())\n" + _SHAKEN),
        (_FIRST, "        first.cancel()"),
        module=CLIENT,
    ),
    broken("frames", "no identity", (_SEND, "encode_message(request_type, payload, request_id)"), module=CLIENT),
    broken(
        "frames", "an empty frame between", (_SEND, _SEND.replace("identity, *", 'identity, b"", *')), module=CLIENT
    ),
    broken(
        "frames",
        "in one frame",
        (_SEND, '[self._process.identity, b"".join(encode_message(request_type, payload, request_id))]'),
        module=CLIENT,
    ),
    broken(
        "frames",
        "the type at last",
        (
            _SEND,
            _SEND.replace(
                "*encode_message(request_type, payload, request_id)",
                "*reversed(encode_message(request_type, payload, request_id))",
            ),
        ),
        module=CLIENT,
    ),
    broken("frames", "an abort of each", ("AbortRequests(request_ids)", "request_ids"), module=CLIENT),
    broken("all", "one each time", (_LOOP, "        if self._output.EVENTS & zmq.POLLIN:\n"), module=CLIENT),
    broken("all", "what came before is not looked at", (_BEGIN, "        return ready\n"), module=CLIENT),
    broken(
        "all",
        "the newest first",
        (
            _PUT,
            "                self._outputs._queue.appendleft(outputs)\n                self._outputs._wakeup_next(self._outputs._getters)\n",
        ),
        module=CLIENT,
    ),
    broken(
        "all",
        "only the newest",
        (
            _PUT,
            "                while not self._outputs.empty():\n                    self._outputs.get_nowait()\n" + _PUT,
        ),
        module=CLIENT,
    ),
    broken(
        "by_id",
        "in turn",
        (
            _FIND,
            "            elif self._calls and (call := self._calls.pop(min(self._calls))) is not None and not call.done():\n",
        ),
        module=CLIENT,
    ),
    broken(
        "by_id",
        "the newest call",
        (
            _FIND,
            "            elif self._calls and (call := self._calls.popitem()[1]) is not None and not call.done():\n",
        ),
        module=CLIENT,
    ),
    broken("by_id", "one id for all", (_NEW_ID, "        call_id = 0\n"), module=CLIENT),
    broken(
        "by_id",
        "an output too",
        (
            _IS_OUTPUT,
            "            if outputs.utility_result is not None:\n                self._outputs.put_nowait(outputs)\n"
            + _IS_OUTPUT,
        ),
        module=CLIENT,
    ),
    broken(
        "by_id",
        "for everybody who waits",
        (
            _FIND,
            "            elif any((call := each) and not each.done() and each is not call or not each.done() for each in self._calls.values()) and [each.set_result(outputs.utility_result.result) for each in self._calls.values() if each is not call and not each.done()] is not None:\n",
        ),
        module=CLIENT,
    ),
    broken(
        "by_id",
        "always true",
        ("call.set_result(outputs.utility_result.result)", "call.set_result(True)"),
        module=CLIENT,
    ),
    broken(
        "late",
        "somebody waits",
        (_FIND, "            elif (call := self._calls.pop(outputs.utility_result.call_id, None)) is not None:\n"),
        module=CLIENT,
    ),
    broken(
        "late",
        "there is such a call",
        (_FIND, "            elif not (call := self._calls.pop(outputs.utility_result.call_id)).done():\n"),
        module=CLIENT,
    ),
    broken("death", "calls are not told", (_CALLS, ""), module=CLIENT),
    broken("death", "outputs are not told", (_TELL, ""), module=CLIENT),
    broken("death", "forgotten", (_REMEMBER, ""), module=CLIENT),
    broken("death", "told once", (_AGAIN, ""), module=CLIENT),
    broken(
        "death",
        "before the outputs",
        (_TELL, "        while not self._outputs.empty():\n            self._outputs.get_nowait()\n" + _TELL),
        module=CLIENT,
    ),
    broken(
        "death",
        "a notice is not read",
        (_NOTICE, "                logger.warning('%s', error)\n                continue\n"),
        module=CLIENT,
    ),
    broken(
        "death",
        "nobody looks at the process",
        ("lambda code: self._report_death(loop,", "lambda code: None and self._report_death(loop,"),
        module=CLIENT,
    ),
    broken(
        "death",
        "as an exception of another kind",
        ("            raise item\n", "            raise RuntimeError(str(item))\n"),
        module=CLIENT,
    ),
    broken(
        "death",
        "one caller has left",
        (
            "            if not call.done():\n                call.set_exception(error)\n",
            "            call.set_exception(error)\n",
        ),
        module=CLIENT,
    ),
]
