"""`outrider up`: the services on this machine, each its own process, watched until the end."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from outrider.cli.files import temporary_folder
from outrider.cli.named_models import check_model, naming
from outrider.cli.say import say
from outrider.cli.serve import SERVICES
from outrider.cli.settings import Resolved, add_flags, resolve
from outrider.cli.up.plan import (
    LOOKUP,
    MTP,
    NONE,
    ChildSpec,
    UpConfig,
    plan_gateway,
    plan_orchestrator,
    plan_replicas,
)
from outrider.cli.up.processes import ServiceProcesses
from outrider.collected import make_folder
from outrider.config import EngineConfig
from outrider.cores import find_cores
from outrider.engine.loading.first_checks import check_settings, check_skipped
from outrider.protocol.errors import ConfigError
from outrider.sockets import bound, cannot_listen
from outrider.threads import check_threads

GATEWAY_NEEDS = "uvicorn"
TAKEN = (errno.EADDRINUSE, errno.EACCES)
"""Errors that another port does not have; another host would help against others."""


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
    check_ports(resolved.config)
    cores = find_cores()
    replicas = plan_replicas(resolved, cores, gpu=Path("/dev/nvidiactl").exists())
    with temporary_folder() as folder:
        replicas_file = Path(folder) / "replicas"
        orchestrator = plan_orchestrator(resolved, str(replicas_file), replicas, cores)
        listener = http_listener(resolved)
        gateway = None
        if listener is not None:
            gateway = plan_gateway(resolved, listener.fileno(), replicas, cores)
        check_services([*replicas, orchestrator, *([gateway] if gateway else [])], arguments.config)
        if resolved.config.collect:
            make_folder(resolved.config.collect)
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
    if config.target:
        with naming("--draft-skip-layers"):
            check_skipped(config.target, config.draft_skip_layers)


def check_services(specs: Sequence[ChildSpec], config_file: str | None) -> None:
    """Refuse settings of services, which may come from their environment or the file too.

    Raises:
        ConfigError: a setting is wrong; names the process and the setting.
    """
    file = ["--config", config_file] if config_file else []
    for spec in specs:
        parser = argparse.ArgumentParser()
        settings = SERVICES[spec.service].config
        add_flags(parser, settings, spec.service)
        arguments = parser.parse_args([*spec.arguments, *file])
        try:
            config = resolve(spec.service, settings, arguments, os.environ).config
            if isinstance(config, EngineConfig):
                check_settings(config)
        except ConfigError as error:
            raise ConfigError(f"{spec.name}: {error}") from error


def check_ports(config: UpConfig) -> None:
    """Refuse ports that the orchestrator could not listen on.

    Raises:
        ConfigError: a port is in use, or the host is no address of this machine; names the flag.
    """
    with ExitStack() as held:
        for flag, port in (("--port", config.port), ("--metrics-port", config.metrics_port)):
            try:
                if port > 0:
                    held.enter_context(bound(config.host, port))
            except OSError as error:
                raise _cannot_listen(flag, config.host, port, error) from error


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
    if port and port in (resolved.config.port, resolved.config.metrics_port):
        raise ConfigError(f"--http-port: {port} is also --port or --metrics-port; choose another")
    if find_spec(GATEWAY_NEEDS) is None:
        if asked:
            raise ConfigError("--http-port: needs more packages; pip install 'outrider[gateway]'")
        say("no HTTP gateway; for one, pip install 'outrider[gateway]'")
        return None
    try:
        return bound(host, port)
    except OSError as error:
        if asked or error.errno not in TAKEN:
            raise _cannot_listen("--http-port", host, port, error) from error
    say(f"port {port} is in use; HTTP gets another, and --http-port chooses one")
    return bound(host, 0)


def _cannot_listen(flag: str, host: str, port: int, error: OSError) -> ConfigError:
    return cannot_listen(flag if error.errno in TAKEN else "--host", f"{host}:{port}", error)
