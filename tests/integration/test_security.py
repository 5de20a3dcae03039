"""Mutual TLS and bearer tokens on every edge of running services: who is refused, renewal while requests run,
and logs that keep secrets."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from outrider.internal.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc
from outrider.v1 import generation_pb2, generation_pb2_grpc, tokens_pb2
from tests.certificates import authority, certificate, mount
from tests.integration.client import collect, details, eventually, request
from tests.integration.cluster import DEMO_TARGET, Cluster, Process

CODE = grpc.StatusCode
HERE = "IP:127.0.0.1"
FIRST, SECOND = "first-token-5dd1", "second-token-77ac"
PROMPT = "def sesame_4711(key):\n"
"""What the logs must not repeat."""
SERVICES = ("verify", "draft", "orchestrator")
CERTIFICATES = {
    "verify": HERE,
    "draft": HERE,
    "orchestrator": HERE,
    "client": "orchestrator",
    "caller": "caller",
}


@dataclass
class Stack:
    """The three services, the folders of their certificates, and their authorities."""

    folder: Path
    authorities: list[Path]
    processes: dict[str, Process] = field(default_factory=dict)

    def renew(self, by: int, trust: tuple[int, ...], days: int = 1, names: tuple[str, ...] = ()) -> None:
        """New certificates of an authority for everybody, or for these, who trust so many authorities."""
        ca = b"".join((self.authorities[index] / "ca.crt").read_bytes() for index in trust)
        for name in names or CERTIFICATES:
            made = certificate(self.authorities[by], CERTIFICATES[name], days)
            mount(self.folder / name, {**made, "ca.crt": ca})

    def tokens(self, *tokens: str) -> None:
        """Replace the tokens file."""
        mount(self.folder / "tokens", {"tokens": "\n".join(tokens).encode()})

    def start(self, cluster: Cluster) -> None:
        """Everything with TLS on both sides; the draft is prompt lookup, which starts at once."""
        always = {"log_level": "debug", "health_port": 0}
        models = {
            "verify": {"model": DEMO_TARGET, "dtype": "float32"},
            "draft": {"kind": "lookup", "tokenizer": DEMO_TARGET},
        }
        for name, model in models.items():
            self.processes[name] = cluster.serve(name, **always, **model, **self.files(name, "tls"))
        endpoints = {name: self.processes[name].wait_ready().endpoint for name in models}
        self.processes["orchestrator"] = cluster.serve(
            "orchestrator",
            **always,
            **endpoints,
            **self.files("orchestrator", "tls"),
            **self.files("client", "tls_client"),
            auth_tokens_file=self.folder / "tokens" / "tokens",
            discovery_seconds=0.2,
        ).wait_ready()

    def files(self, name: str, prefix: str) -> dict[str, Path]:
        """Settings that name a folder's files."""
        kinds = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
        return {f"{prefix}_{kind}": self.folder / name / file for kind, file in kinds.items()}

    def endpoint(self, service: str) -> str:
        """Where a service listens."""
        return self.processes[service].endpoint

    def channel(
        self, service: str, files: Path | None = None, name: str = "", shown: bool = True
    ) -> grpc.Channel:
        """A channel with a caller's certificates; checked for a name that is not the host's where given."""
        files = files or self.folder / "caller"
        ca, key, chain = ((files / file).read_bytes() for file in ("ca.crt", "tls.key", "tls.crt"))
        credentials = grpc.ssl_channel_credentials(ca, key if shown else None, chain if shown else None)
        options = [("grpc.use_local_subchannel_pool", 1)]
        if name:
            options.append(("grpc.ssl_target_name_override", name))
        return grpc.secure_channel(self.endpoint(service), credentials, options)

    def metric(self, service: str, name: str, files: str) -> float:
        """A sample about files."""
        sample = re.escape(f'outrider_{service}_{name}{{files="{files}"}}')
        (found,) = re.findall(rf"^{sample} (\S+)$", self.page(service), re.MULTILINE)
        return float(found)

    def page(self, service: str) -> str:
        """A service's metrics."""
        with urlopen(self.processes[service].ready["metrics"], timeout=5) as response:
            text: str = response.read().decode()
        return text


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Running services."""
    folder = tmp_path_factory.mktemp("security")
    one = Stack(folder, [authority(folder / name) for name in ("first-ca", "second-ca")])
    one.renew(0, (0,))
    one.tokens(FIRST)
    cluster = Cluster(folder)
    try:
        one.start(cluster)
        yield one
    finally:
        cluster.stop()


def ask(channel: grpc.Channel, service: str, token: str = FIRST) -> None:
    """A small call of a service."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    if service == "verify":
        verify = verify_pb2_grpc.VerifyServiceStub(channel)
        verify.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest(), timeout=10)
    elif service == "draft":
        draft = draft_pb2_grpc.DraftServiceStub(channel)
        draft.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=10)
    else:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        generation.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=10, metadata=metadata)


def refusal(channel: grpc.Channel, service: str, token: str = FIRST) -> grpc.RpcError:
    """The error that a call ends with."""
    with channel, pytest.raises(grpc.RpcError) as caught:
        ask(channel, service, token)
    return caught.value


def stranger(stack: Stack, service: str, kind: str, folder: Path) -> grpc.Channel:
    """A channel of somebody who must not be served."""
    if kind == "plaintext":
        return grpc.insecure_channel(stack.endpoint(service))
    if kind == "wrong name":
        return stack.channel(service, name="another")
    if kind == "no certificate":
        return stack.channel(service, shown=False)
    days, by = (-1, 0) if kind == "expired" else (1, 1)
    made = certificate(stack.authorities[by], "caller", days)
    trusted = (stack.authorities[0] / "ca.crt").read_bytes()
    if kind == "server of another authority":
        made, trusted = certificate(stack.authorities[0], "caller"), made["ca.crt"]
    return stack.channel(service, mount(folder / "stranger", {**made, "ca.crt": trusted}))


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    "kind",
    [
        "plaintext",
        "expired",
        "wrong name",
        "wrong authority",
        "server of another authority",
        "no certificate",
    ],
)
def test_strangers_are_refused(stack: Stack, service: str, kind: str, tmp_path: Path) -> None:
    """There is no connection, whatever token is sent; the next caller is served."""
    assert refusal(stranger(stack, service, kind, tmp_path), service).code() is CODE.UNAVAILABLE
    with stack.channel(service) as channel:
        ask(channel, service)


@pytest.mark.parametrize("token", ["", "wrong", FIRST[:-1], FIRST + "x", SECOND])
def test_callers_without_a_token_are_refused(stack: Stack, token: str) -> None:
    """A certificate is not enough at the public edge; the answer does not repeat what was sent."""
    error = refusal(stack.channel("orchestrator"), "orchestrator", token)
    assert error.code() is CODE.UNAUTHENTICATED
    assert details(error)["ErrorInfo"].reason == "UNAUTHENTICATED"
    assert not token or token not in error.details()


@pytest.mark.parametrize("service", SERVICES)
def test_nobody_is_told_what_there_is(stack: Stack, service: str) -> None:
    """Reflection is off unless it is asked for."""
    with stack.channel(service) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as caught:
            next(call(iter([b"\x3a\x00"]), timeout=10))
        assert caught.value.code() is CODE.UNIMPLEMENTED


class Callers:
    """Requests one after another, each on a connection of its own, until the block ends."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.token = FIRST
        self.texts: list[str] = []
        self.errors: list[Exception] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Callers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    def more(self) -> bool:
        """Wait for a request that began after now."""
        count = len(self.texts) + 2
        eventually(lambda: len(self.texts) >= count or bool(self.errors), "requests are served")
        return not self.errors

    def _run(self) -> None:
        while not self._over.is_set() and not self.errors:
            try:
                with self.stack.channel("orchestrator") as channel:
                    self.texts.append(text_of(channel, self.token))
            except Exception as error:
                self.errors.append(error)


def text_of(channel: grpc.Channel, token: str) -> str:
    """What is generated."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    metadata = (("authorization", f"Bearer {token}"),)
    return collect(stub.Generate(request(PROMPT, max_tokens=24), timeout=60, metadata=metadata))[0].text


def test_certificates_and_tokens_are_renewed_under_load(stack: Stack) -> None:
    """The authority is replaced in three steps and the token in two, while requests run and one stream stays
    open: none fails, all have the same text."""
    with stack.channel("verify") as channel, Callers(stack) as callers:
        messages: queue.Queue[verify_pb2.VerifyRequest] = queue.Queue()
        long = verify_pb2_grpc.VerifyServiceStub(channel).Verify(iter(messages.get, None), timeout=280)
        messages.put(open_verify(4))
        assert committed(long, 4) == 4
        assert callers.more(), callers.errors
        for days, (by, trust) in enumerate(((0, (0, 1)), (1, (0, 1)), (1, (1,))), 2):
            before = {name: expiry(stack, name) for name in SERVICES}
            stack.renew(by, trust, days, names=("verify", "draft", "client", "caller", "orchestrator"))
            eventually(lambda before=before: all_newer(stack, before), "the certificates are in use")
            assert callers.more(), callers.errors
        stack.tokens(FIRST, SECOND)
        eventually(lambda: opens(stack, SECOND), "the new token works")
        callers.token = SECOND
        assert callers.more(), callers.errors
        stack.tokens(SECOND)
        eventually(lambda: not opens(stack, FIRST), "the old token does not")
        assert callers.more(), callers.errors
        messages.put(verify_pb2.VerifyRequest(close=verify_pb2.CloseVerify(keep=True)))
        assert next(long).closed.kv_handle.length > 0
    assert callers.errors == []
    assert len(set(callers.texts)) == 1
    stack.tokens(FIRST, SECOND)
    eventually(lambda: opens(stack, FIRST), "the first token is back")


def open_verify(max_tokens: int) -> verify_pb2.VerifyRequest:
    """A session that commits so many tokens and then waits to be closed."""
    sampling = tokens_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    opening = verify_pb2.OpenVerify(
        request_id="long", token_ids=[1, 2, 3], prompt_length=3, sampling=sampling
    )
    return verify_pb2.VerifyRequest(open=opening)


def committed(responses: Iterator[verify_pb2.VerifyResponse], count: int) -> int:
    """Read until so many tokens are committed."""
    tokens = 0
    while tokens < count:
        tokens += len(next(responses).verdict.tokens)
    return tokens


def expiry(stack: Stack, service: str) -> float:
    """End of the certificates' validity; the sooner one of a service with two."""
    name = "certificate_expires_timestamp_seconds"
    ends = [stack.metric(service, name, "server_certificate")]
    if service == "orchestrator":
        ends.append(stack.metric(service, name, "client_certificate"))
    return min(ends)


def all_newer(stack: Stack, before: dict[str, float]) -> bool:
    """Every service has taken up its new certificates."""
    return all(expiry(stack, name) > before[name] + 3600 for name in SERVICES)


def opens(stack: Stack, token: str) -> bool:
    """Whether a token is let in."""
    with stack.channel("orchestrator") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        metadata = (("authorization", f"Bearer {token}"),)
        future = stub.GetModelInfo.future(generation_pb2.GetModelInfoRequest(), timeout=10, metadata=metadata)
        assert future.code() in (CODE.OK, CODE.UNAUTHENTICATED), future.details()
        return future.code() is CODE.OK


def test_bad_renewals_are_reported_and_harm_nobody(stack: Stack) -> None:
    """Expired certificates and a tokens file without tokens: each is counted and logged once, the old
    ones stay."""
    before = {name: expiry(stack, name) for name in SERVICES}
    good = {name: (stack.folder / name / "tls.crt").read_bytes() for name in CERTIFICATES}
    stack.renew(1, (1,), -1, names=("verify", "draft", "client", "orchestrator"))
    stack.tokens("")
    expected = {(name, "server_certificate"): 1.0 for name in SERVICES}
    expected |= {("orchestrator", "client_certificate"): 1.0, ("orchestrator", "bearer_tokens"): 1.0}

    def counted() -> bool:
        return all(stack.metric(name, "files_refused_total", files) == 1 for name, files in expected)

    eventually(counted, "all are counted", 30)
    assert {name: expiry(stack, name) for name in SERVICES} == before
    with stack.channel("orchestrator") as channel:
        assert text_of(channel, FIRST)
    for name in SERVICES:
        lines = [
            line for line in stack.processes[name].log.read_text().splitlines() if "cannot be used" in line
        ]
        assert len(lines) == sum(1 for service, _ in expected if service == name)
        assert any("expired" in line for line in lines)
    stack.renew(1, (1,), 9, names=("verify", "draft", "client", "orchestrator"))
    stack.tokens(FIRST)
    eventually(lambda: all_newer(stack, before), "good ones are taken up again")
    assert good["caller"] == (stack.folder / "caller" / "tls.crt").read_bytes()


def test_logs_and_metrics_keep_secrets(stack: Stack) -> None:
    """At the level debug, after all of the above and some bad requests: no token, prompt, text or key."""
    with stack.channel("orchestrator") as channel:
        text = text_of(channel, FIRST)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for bad in (
            request(PROMPT, temperature=-1.0),
            request(PROMPT, fields={"session": PROMPT.encode()}),
            request(PROMPT, stop=[""]),
            request(PROMPT * 2000),
        ):
            with pytest.raises(grpc.RpcError):
                list(stub.Generate(bad, timeout=20, metadata=(("authorization", f"Bearer {FIRST}"),)))
    assert len(text) > 10
    keys = [(stack.folder / name / "tls.key").read_text().splitlines()[1] for name in CERTIFICATES]
    secrets = ["sesame_4711", FIRST, SECOND, text.strip()[:30], "PRIVATE", *keys]
    for service in SERVICES:
        log = stack.processes[service].log.read_text()
        assert log.count("\n") > 3
        page = stack.page(service)
        assert [secret for secret in secrets if secret in log or secret in page] == []
