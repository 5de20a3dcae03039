"""What `outrider up` refuses before it starts anything, and which HTTP port it gets."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli.main import main
from outrider.cli.settings import Resolved, add_flags, resolve
from outrider.cli.up import command
from outrider.cli.up.plan import UpConfig
from outrider.protocol.errors import ConfigError
from outrider.sockets import bound, listen


def _resolved(*flags: str) -> Resolved[UpConfig]:
    parser = argparse.ArgumentParser()
    add_flags(parser, UpConfig, "up")
    return resolve("up", UpConfig, parser.parse_args(flags), {})


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use."""
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_was_asked_for_must_be_free(taken: int) -> None:
    """Whoever names it would look for the service there."""
    with pytest.raises(ConfigError, match=f"--http-port: cannot listen on 127.0.0.1:{taken}"):
        command.http_listener(_resolved("--http-port", str(taken)))


@pytest.mark.parametrize("other", ["--port", "--metrics-port"])
def test_one_port_does_not_serve_both(other: str) -> None:
    """The gateway could not listen there, once all models are loaded."""
    with pytest.raises(ConfigError, match="--http-port: 7720 is also --port or --metrics-port"):
        command.http_listener(_resolved("--http-port", "7720", other, "7720"))


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_the_orchestrator_s_ports_must_be_free(taken: int, flag: str) -> None:
    """The orchestrator would find it out when the models are being loaded."""
    with pytest.raises(ConfigError, match=f"^{flag}: cannot listen on 127.0.0.1:{taken}"):
        command.check_ports(_resolved(flag, str(taken)).config)
    with bound("127.0.0.1", 0) as listener:
        port = str(listener.getsockname()[1])
    with pytest.raises(ConfigError, match=f"^--metrics-port: cannot listen on 127.0.0.1:{port}"):
        command.check_ports(_resolved("--port", port, "--metrics-port", port).config)
    command.check_ports(_resolved("--port", port).config)


def test_what_services_would_refuse_is_refused_before_they_start(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder to collect in, skipped layers, and settings from the environment."""
    monkeypatch.setattr(command, "ServiceProcesses", None)
    target = "models/demo/target"
    up = ["up", "--target", target, "--http-port", "-1", "--port", "0"]
    refused = [
        (("--collect", "/proc/nowhere"), "collect: cannot make the folder '/proc/nowhere'"),
        (("--port", str(taken)), "--port: cannot listen"),
        (
            ("--draft", target, "--draft-skip-layers", "6"),
            "--draft-skip-layers: the model has the layers 0 to 5",
        ),
    ]
    for flags, sentence in refused:
        assert main([*up, *flags]) == 2
        assert capsys.readouterr().err.startswith(f"outrider: {sentence}")
    monkeypatch.setenv("OUTRIDER_DRAFT_HELPER_CPUS", "4096")
    assert main([*up, "--draft", target]) == 2
    assert capsys.readouterr().err.startswith("outrider: draft-0: helper_cpus: '4096' is not a list of cores")


def test_the_default_port_may_be_in_use(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Another is taken, and a sentence says so."""
    resolved = _resolved()
    config = resolved.config.model_copy(update={"http_port": taken})
    with command.http_listener(Resolved("up", config, resolved.sources)) as listener:
        assert listener.getsockname()[1] not in (0, taken)
    assert f"port {taken} is in use" in capsys.readouterr().err


def test_a_port_is_held_before_it_is_listened_on() -> None:
    """Another `up` that starts while this one loads its models takes another port."""
    with command.http_listener(_resolved("--http-port", "0")) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--http-port: cannot listen on 127.0.0.1:{port}"):
            command.http_listener(_resolved("--http-port", str(port)))
        listen(first)
        with socket.create_connection(first.getsockname()), first.accept()[0]:
            pass  # the server ends first: its side of the connection stays in TIME_WAIT
    with bound("127.0.0.1", port) as again:
        listen(again)


@pytest.mark.parametrize("flags", [(), ("--http-port", "0")])
@pytest.mark.parametrize("host", ["192.0.2.1", "256.1.1.1", "a..b"])
def test_a_host_must_be_an_address_of_this_machine(host: str, flags: tuple[str, ...]) -> None:
    """No other port would help."""
    with pytest.raises(ConfigError, match=f"--host: cannot listen on {host}"):
        command.http_listener(_resolved("--host", host, *flags))


def test_it_can_be_switched_off() -> None:
    """Nothing is bound."""
    assert command.http_listener(_resolved("--http-port", "-1")) is None


def test_without_its_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything else starts, unless HTTP was asked for."""
    monkeypatch.setattr(command, "find_spec", lambda _name: None)
    assert command.http_listener(_resolved()) is None
    assert "pip install 'outrider[gateway]'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="pip install"):
        command.http_listener(_resolved("--http-port", "0"))


def test_a_bound_socket_listens_for_whoever_gets_it() -> None:
    """Its port is known before."""
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname(), timeout=5):
            pass


def test_a_model_that_neither_disk_nor_hub_has_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked once; the replicas would ask it again and again."""

    def nobody(*_: object, **__: object) -> None:
        raise ConnectionError("Connection refused")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", nobody)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(
        ConfigError, match=r"--target: there is no folder 'owner/it'.* \(Connection refused\)"
    ):
        command.check_models(UpConfig(target="owner/it"))
    with pytest.raises(ConfigError, match="--draft: there is no folder 'owner/it'"):
        command.check_models(UpConfig(draft=("owner/it",)))


def test_a_model_whose_config_is_no_json_is_refused_at_once(tmp_path: Path) -> None:
    """No process is started to say it."""
    (tmp_path / "config.json").write_text('{"model_type":')
    with pytest.raises(ConfigError, match=r"^--draft: config.json of .* is not JSON"):
        command.check_models(UpConfig(draft=(str(tmp_path),)))


def test_a_model_that_was_downloaded_needs_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/cache/config.json")
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", None)
    command.check_models(UpConfig(target="owner/it"))
