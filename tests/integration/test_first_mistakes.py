"""The mistakes that are made first, each by its command line: one sentence that names the mend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from outrider.sockets import bound
from tests.integration.cluster import DEMO_TARGET, Process
from tests.integration.command import outrider
from tests.integration.test_distribution import tiny_llama


@dataclass(frozen=True, slots=True)
class Places:
    """What the command lines name."""

    grpc: str
    """An orchestrator."""
    http: str
    """A gateway before it, without a scheme."""
    taken: str
    """A port that somebody listens on."""
    nobody: str
    """An address that nobody listens on."""
    other: str
    """A model without a tokenizer."""
    empty: str
    """A folder without a model."""


@pytest.fixture(scope="module")
def places(demo, cluster, tmp_path_factory) -> Iterator[Places]:
    """A demo orchestrator with a gateway, and places where nothing is."""
    folder = tmp_path_factory.mktemp("mistakes")
    grpc = demo.orchestrator("none").endpoint
    gateway: Process = cluster.serve("gateway", orchestrator=grpc).wait_ready()
    (folder / "empty").mkdir()
    with bound("127.0.0.1", 0) as taken, bound("127.0.0.1", 0) as silent:
        taken.listen()
        yield Places(
            grpc=grpc,
            http=gateway.endpoint.removeprefix("http://"),
            taken=str(taken.getsockname()[1]),
            nobody=f"127.0.0.1:{silent.getsockname()[1]}",
            other=str(tiny_llama(folder / "other", 1, 8)),
            empty=str(folder / "empty"),
        )


TARGET = str(DEMO_TARGET)
MISTAKES = {
    "wrong port": (
        "generate hi --endpoint {nobody}",
        "cannot reach {nobody}; is `outrider up` or an orchestrator running there?",
    ),
    "an URL for gRPC": ("generate hi --endpoint http://{grpc}", "must be HOST:PORT of the gRPC service"),
    "no port": ("timeline hi --endpoint localhost --output x.html", "must be HOST:PORT, not 'localhost'"),
    "gRPC to the HTTP port": (
        "generate hi --endpoint {http}",
        "{http} speaks HTTP, not gRPC; give the orchestrator's port, 7700 by default",
    ),
    "bench: gRPC to the HTTP port": ("bench --requests 1 --endpoint {http}", "give the orchestrator's port"),
    "HTTP to the gRPC port": (
        "bench --requests 1 --openai http://{grpc}/v1",
        "give an HTTP port, not gRPC's, or try --model",
    ),
    "no /v1": ("bench --requests 1 --openai http://{http}", "check the address, most end in /v1"),
    "no scheme": ("bench --requests 1 --openai {http}", "must be such as http://host:8000/v1"),
    "TLS to plaintext": (
        "generate hi --endpoint {grpc} --tls-ca system",
        "{grpc} does not speak TLS; leave the TLS authorities out",
    ),
    "--top-k -1": (
        "generate hi --endpoint {grpc} --top-k -1",
        "--top-k: -1 .* use 0 or more",
    ),
    "--seed -1": ("generate hi --endpoint {grpc} --seed -1", "--seed: -1 .* use 0 or more"),
    "--max-tokens": (
        "generate hi --endpoint {grpc} --max-tokens 9999",
        "--max-tokens: 9999 and a prompt of .* lower it or shorten the prompt",
    ),
    "a mistyped flag": (
        "generate hi --max-token 3",
        "--max-token is no flag of outrider generate; did you mean --max-tokens?",
    ),
    "an unknown flag": (
        "bench --colour red",
        "--colour is no flag of outrider bench; `outrider bench --help`",
    ),
    "words without quotes": ("generate def main", "'main' is more than outrider generate takes; put a text"),
    "a mistyped command": ("generat hi", "outrider: COMMAND: 'generat' is none of 'up', 'serve'"),
    "no prompt": ("generate --endpoint {grpc}", "prompt: standard input is empty; give a text, --file"),
    "an empty prompt": ("generate --endpoint {grpc} ''", "prompt: must give at least one token"),
    "no file": ("timeline --file nothing --output x.html", "--file: cannot read 'nothing'"),
    "a picture of no kind": ("timeline hi --output x.png", "'x.png' must end in .html, .svg, .json"),
    "up without a target": ("up", "--target: name the target model, a folder or a hub id"),
    "no folder": ("up --target /nowhere", "--target: there is no folder '/nowhere'; give a folder with"),
    "a folder that is no model": (
        "up --target {empty}",
        "--target: '{empty}' has no config.json; give a folder with config.json and weights, or a hub id",
    ),
    "a draft that is no model": (
        f"up --target {TARGET} --draft {{empty}}",
        "--draft: '{empty}' has no",
    ),
    "a hub id without network": (
        "serve verify --port 0 --model owner/nothing",
        "there is no folder 'owner/nothing', and as a hub id it cannot be loaded",
    ),
    "too little time": ("generate hi --endpoint {grpc} --timeout 0.001", "; raise the timeout"),
    "a draft without a tokenizer": (
        f"up --port 0 --http-port -1 --target {TARGET} --draft {{other}}",
        "'other' came without a tokenizer, .* put one into its folder, or use lookup",
    ),
    "port in use": (
        f"up --target {TARGET} --draft none --http-port -1 --port {{taken}}",
        "--port: cannot listen on 127.0.0.1:{taken} (Address already in use); choose another",
    ),
    "HTTP port in use": (
        f"up --target {TARGET} --port 0 --http-port {{taken}}",
        "--http-port: cannot listen on 127.0.0.1:{taken}",
    ),
    "serve: port in use": ("serve draft --kind lookup --port {taken}", "it is in use .* choose another"),
    "serve without a model": ("serve verify --port 0", "model: not set; give a folder"),
    "serve without replicas": ("serve orchestrator --port 0", "verify: name at least one verify replica"),
    "an URL of a replica": (
        "serve orchestrator --port 0 --verify http://{nobody}",
        "verify: 'http://{nobody}' is not host:port or dns:name:port",
    ),
    "an URL of the orchestrator": (
        "serve gateway --port 0 --orchestrator http://{grpc}",
        "orchestrator: 'http://{grpc}' is no gRPC endpoint; give host:port",
    ),
}


LONG = "a draft without a tokenizer"
"""Loads a pair before it is found out."""


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=pytest.mark.slow if name == LONG else ()) for name in MISTAKES]
)
def test_a_mistake_is_told_with_its_mend(places: Places, mistake: str, tmp_path: Path) -> None:
    """The last line says what to change; the status is 1 or 2, and nothing was ready."""
    line, sentence = MISTAKES[mistake]
    fields = {name: getattr(places, name) for name in Places.__slots__}
    done = run(line.format(**fields), tmp_path)
    assert done.returncode in (1, 2), done.stderr
    assert '"event": "ready"' not in done.stdout
    assert "Traceback" not in done.stderr
    assert _said(sentence.format(**fields), done.stderr), done.stderr


def test_the_words_are_not_a_log(places: Places, tmp_path: Path) -> None:
    """A command that asks once says its one sentence and nothing else."""
    done = run(f"generate hi --endpoint {places.http}", tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"outrider: {places.http} speaks HTTP")


def run(line: str, folder: Path) -> CompletedProcess[str]:
    """Run a command line in a folder."""
    return outrider(*(word.strip("'") for word in line.split(" ")), folder=folder)


def _said(sentence: str, text: str) -> bool:
    """Whether a line has all parts of the sentence, which are separated by ` .* `, in their order."""
    for line in text.splitlines():
        rest, found = line, True
        for part in sentence.split(" .* "):
            _, sign, rest = rest.partition(part)
            found = found and bool(sign)
        if found:
            return True
    return False
