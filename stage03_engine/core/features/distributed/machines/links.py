"""Messages between the executor and workers on several machines: a ROUTER, which knows each worker by its name."""

from __future__ import annotations

import contextlib

import zmq

from stage03_engine.core.features.distributed.machines.addresses import secret_of_worker
from stage03_engine.core.features.distributed.worker_links import LinkToExecutor, Message, WorkerLinks
from stage03_engine.errors import StagesError
from stage03_engine.nodes.secure_sockets import Connection, Listener, Lost, NodeSecret, Refused, read_secret

NAME = b"worker"
LINGER_MS = 1000  # for the last message of a worker that ends


class WorkerRouter(WorkerLinks):
    """Listens on `address` for so many workers; what others say is ignored. Raises StagesError if it cannot."""

    def __init__(self, address: str, secret: NodeSecret | None, num_workers: int) -> None:
        self._rank_of = {NAME + b"%d" % rank: rank for rank in range(num_workers)}
        self._context = zmq.Context()
        try:
            self._listener = Listener(self._context, zmq.ROUTER, address, secret)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.address = self._listener.address
        self._listener.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a worker that is gone is an error

    def send(self, rank: int, message: Message) -> None:
        try:
            self._listener.socket.send_multipart([NAME + b"%d" % rank, *message])
        except zmq.ZMQError as error:
            raise OSError(str(error)) from error

    def receive(self, milliseconds: int) -> tuple[int, Message] | None:
        self._listener.socket.setsockopt(zmq.RCVTIMEO, milliseconds)
        with contextlib.suppress(zmq.Again):
            name, *message = self._listener.socket.recv_multipart()
            if name in self._rank_of and len(message) == 3:
                return self._rank_of[name], (message[0], message[1], message[2])
        return None

    def close(self) -> None:
        self._listener.close()
        self._context.destroy(linger=0)


class RouterToExecutor(LinkToExecutor):
    """A worker's end. It finds the secret in its environment."""

    def __init__(self, address: str, rank: int) -> None:
        self._context = zmq.Context()
        secret = read_secret(secret_of_worker(), warn=False)  # its machine has warned
        self._connection = Connection(self._context, zmq.DEALER, address, secret, NAME + b"%d" % rank)
        self._socket, self._poller = self._connection.socket, zmq.Poller()
        for each in (self._socket, self._connection.monitor):
            self._poller.register(each, zmq.POLLIN)

    def send(self, *message: bytes) -> None:
        kind, payload, cause = (*message, b"")[:3]
        self._socket.send_multipart([kind, payload, cause])

    def receive(self) -> Message:
        """Raises StagesError if the connection is lost: ZMQ would make a new one, but what was on its way is gone."""
        while self._socket not in dict(self._poller.poll()):
            try:
                self._connection.news()
            except Lost:
                raise StagesError("its connection to the engine is lost") from None
            except Refused:
                pass  # the executor may have been busy: it is tried again
        kind, payload, cause = self._socket.recv_multipart()
        return kind, payload, cause

    def poll(self, milliseconds: int) -> bool:
        return bool(self._socket.poll(milliseconds))

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)
