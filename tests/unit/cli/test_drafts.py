"""`outrider drafts` where an address is wrong: one sentence that names it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.cli.main import main
from outrider.sockets import bound
from tests.unit.client.fake_orchestrator import FakeOrchestrator, serving


@pytest.fixture
def orchestrator() -> Iterator[str]:
    """The address of a service that is no draft replica."""
    with serving(FakeOrchestrator()) as (_, endpoint):
        yield endpoint


@pytest.mark.parametrize("command", ["list", "promote", "demote"])
def test_a_port_without_a_draft_replica_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether somebody listens there or nobody; no table is begun."""
    with bound("127.0.0.1", 0) as closed, bound("127.0.0.1", 0) as silent:
        silent.listen()
        nobody, late = "is a draft replica running there?", "raise the timeout"
        for listener, advice in ((closed, nobody), (silent, late)):
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            assert main(["drafts", command, address, "--timeout", "0.5"]) == 1
            said = capsys.readouterr()
            assert address in said.err
            assert said.err.endswith(f"{advice}\n")
            assert not said.out


def test_another_service_is_told_apart(orchestrator: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without gRPC's words for a method that is not there."""
    assert main(["drafts", "list", orchestrator]) == 2
    said = f"{orchestrator} is another service, or of another release; give a draft replica's port"
    assert capsys.readouterr().err == f"outrider: {said}\n"


def test_an_address_has_a_port(capsys: pytest.CaptureFixture[str]) -> None:
    """As every endpoint."""
    with pytest.raises(SystemExit):
        main(["drafts", "list", "draft-0"])
    assert "must be HOST:PORT, not 'draft-0'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["drafts", "list", "draft-0:99999"])
    assert "must be HOST:PORT, not 'draft-0:99999'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["drafts", "list", "\udcff:1"])
    assert "must be HOST:PORT, not '\\udcff:1'" in capsys.readouterr().err


def test_a_file_is_named_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """Not by the setting that a service has for it."""
    assert main(["drafts", "list", "127.0.0.1:1", "--tls-cert", "x"]) == 2
    assert capsys.readouterr().err == "outrider: --tls-key: must be set when --tls-cert is\n"
    assert main(["generate", "x", "--tls-ca", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("outrider: --tls-ca: cannot read '/nowhere'")
