"""`outrider up`: the services on this machine, each its own process, watched until the end."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import socket
from importlib.util import find_spec
from pathlib import Path

from outrider.cli.files import temporary_folder
from outrider.cli.named_models import check_model
from outrider.cli.say import say
from outrider.cli.settings import Resolved, resolve
from outrider.cli.up.plan import LOOKUP, MTP, NONE, UpConfig, plan_gateway, plan_orchestrator, plan_replicas
from outrider.cli.up.processes import ServiceProcesses
from outrider.cores import find_cores
from outrider.protocol.errors import ConfigError
from outrider.sockets import bound
from outrider.threads import check_threads

GATEWAY_NEEDS = "uvicorn"


def up(arguments: argparse.Namespace) -> int:
    """Run everything until SIGINT or SIGTERM; returns the exit status.

    Raises:
        ConfigError: a setting is wrong.
        OSError: the services together may have too few threads.
    """
    resolved = resolve("up", UpConfig, arguments, os.environ)
    if arguments.print_config:
        print(resolved.render())
        return 0
    check_models(resolved.config)
    cores = find_cores()
    replicas = plan_replicas(resolved, cores, gpu=Path("/dev/nvidiactl").exists())
    with temporary_folder() as folder:
        replicas_file = Path(folder) / "replicas"
        orchestrator = plan_orchestrator(resolved, str(replicas_file), replicas, cores)
        listener = http_listener(resolved)
        gateway = None
        if listener is not None:
            gateway = plan_gateway(resolved, listener.fileno(), replicas, cores)
        check_threads(len(replicas) + 1 + (gateway is not None))  # they start at once, and each finds room
        fleet = ServiceProcesses(
            replicas,
            orchestrator,
            replicas_file,
            arguments.config,
            resolved.config.grace_seconds,
            gateway=gateway,
            listener=listener,
        )
        return asyncio.run(fleet.run())


def check_models(config: UpConfig) -> None:
    """Refuse names that are plainly no models before any process is started.

    Raises:
        ConfigError: a name is no model; names the flag.
    """
    given = [("target", config.target), *(("draft", draft) for draft in config.draft)]
    for flag, model in given:
        if not model or (flag == "draft" and model in (LOOKUP, MTP, NONE)):
            continue
        check_model(f"--{flag}", model)


def http_listener(resolved: Resolved[UpConfig]) -> socket.socket | None:
    """The socket of the gateway, kept open here so that a restarted gateway has the same port.

    None if no gateway is wanted, or if none was asked for and its packages are missing.

    Raises:
        ConfigError: a gateway was asked for, and its packages are missing or its port is in use; or the host
            is no address of this machine.
    """
    host, port, asked = resolved.config.host, resolved.config.http_port, resolved.given("http_port")
    if port < 0:
        return None
    if port == resolved.config.port != 0:
        raise ConfigError(f"--http-port: {port} is the port of gRPC, --port; choose another")
    if find_spec(GATEWAY_NEEDS) is None:
        if asked:
            raise ConfigError("--http-port: needs more packages; pip install 'outrider[gateway]'")
        say("no HTTP gateway; for one, pip install 'outrider[gateway]'")
        return None
    try:
        return bound(host, port)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        if asked or not taken:
            flag = "--http-port" if taken else "--host"
            raise ConfigError(
                f"{flag}: cannot listen on {host}:{port} ({error.strerror}); choose another"
            ) from error
    say(f"port {port} is in use; HTTP gets another, and --http-port chooses one")
    return bound(host, 0)
