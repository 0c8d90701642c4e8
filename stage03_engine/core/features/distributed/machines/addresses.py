"""Where the machines of one engine meet. Imports no torch."""

from __future__ import annotations

import logging
import os
import socket
import time

import psutil

from stage03_engine.core.features.distributed.manifest import ParallelConfig
from stage03_engine.errors import ConfigError
from stage03_engine.nodes.manifest import NodeConfig

logger = logging.getLogger(__name__)
SECRET_FILE, SECRET_REQUIRED = "STAGES_NODE_SECRET_FILE", "STAGES_NODE_SECRET_REQUIRED"


def tcp(address: str, port: int | str) -> str:
    """`tcp://10.0.0.1:29501`; for an IPv6 address with brackets."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def head_address(parallel: ParallelConfig, seconds: float = 0.0) -> str:
    """The IP address of machine 0: sockets cannot listen on a name. A name that is not known yet, as in a cluster that starts, is asked for
    again for so many seconds. Raises ConfigError for an unknown name."""
    deadline, has_warned = time.monotonic() + seconds, False
    while True:
        try:
            return str(socket.getaddrinfo(parallel.master_addr, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            unknown = f"master_addr {parallel.master_addr!r} is not an address: {error.strerror}"
        if time.monotonic() >= deadline:
            raise ConfigError(unknown)
        if not has_warned:
            logger.warning("%s; asking again for %.0f s.", unknown, seconds)
            has_warned = True
        time.sleep(min(0.5, seconds))


def nodes_port(parallel: ParallelConfig) -> int:
    """Where the head listens for the other machines. torch uses --master-port itself."""
    return parallel.master_port + 1


def interface_towards(address: str) -> str | None:
    """The network interface of this machine that reaches `address`; None if the system does not say."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
    names = psutil.net_if_addrs().items()
    return next((name for name, found in names if own in (each.address.partition("%")[0] for each in found)), None)


def environment_with_secret(environment: dict[str, str], config: NodeConfig) -> dict[str, str]:
    """What a worker process needs to connect to the head. The secret itself is in its file, or in the environment already."""
    required, file = {SECRET_REQUIRED: str(config.node_secret_required).lower()}, config.node_secret_file
    named = {} if file is None else {SECRET_FILE: os.path.abspath(os.path.expanduser(file))}
    return environment | required | named


def secret_of_worker() -> NodeConfig:
    """The other end of `environment_with_secret`."""
    return NodeConfig(os.environ.get(SECRET_FILE), os.environ.get(SECRET_REQUIRED) != "false")
