"""The manifests name what the code has: settings, ports, health services, commands, times."""

from __future__ import annotations

import argparse
import asyncio
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk import environment_variables
from prometheus_client import CollectorRegistry

from orchestrator.gateway.app import ENDPOINTS, OPEN
from orchestrator.gateway.instruments import GatewayInstruments
from orchestrator.main import SERVICE
from orchestrator.observing.scaler_servicer import REPLICAS, ScalerServicer
from orchestrator.replicas.discovery import Address
from orchestrator.replicas.fleet import MOVES
from outrider.cli.main import _parser
from outrider.cli.serve import SERVICES as PROGRAMS
from outrider.cli.settings import resolve
from outrider.config import EngineConfig, GatewayConfig, OrchestratorConfig, ProcessConfig, ServiceConfig
from outrider.internal.keda import externalscaler_pb2
from outrider.open_files import MAX_CONNECTIONS
from outrider.protocol.errors import ConfigError
from outrider.rpc.channels import SEVERAL
from outrider.rpc.serving import GrpcServer
from outrider.telemetry.instruments import OrchestratorInstruments
from tests.k8s.manifests import (
    COLLECTOR,
    GRPC_SERVICES,
    K8S,
    OVERLAYS,
    ROOT,
    SERVICES,
    WORKLOADS,
    Manifests,
    compose,
    container,
    environment,
    of_kind,
    overlay,
    pod,
    workload,
)

EXIT_SECONDS = 10
"""For the last statuses, the engine's running step and the last spans, after the drain."""
OF_GRPC = pytest.mark.parametrize(
    ("name", "service"), [(name, service) for name in OVERLAYS for service in GRPC_SERVICES]
)
EVERYWHERE = pytest.mark.parametrize(
    ("name", "service"), [(name, service) for name in OVERLAYS for service in SERVICES]
)


def settings(manifests: Manifests, service: str) -> Any:
    """What the container's process would resolve, by the real command line; raises on an unknown name."""
    arguments: argparse.Namespace = _parser().parse_args(container(manifests, service)["args"])
    assert arguments.service == service
    config: type[ProcessConfig] = PROGRAMS[service].config
    return resolve(service, config, arguments, environment(manifests, service)).config


def quantity(text: str | int) -> float:
    """A CPU or memory quantity as a number."""
    units = {"m": 1e-3, "Mi": 2.0**20, "Gi": 2.0**30}
    number = str(text)
    for unit, factor in units.items():
        if number.endswith(unit):
            return float(number.removesuffix(unit)) * factor
    return float(number)


@EVERYWHERE
def test_settings_are_settings(name: str, service: str) -> None:
    """Arguments and environment parse as the process would parse them: no name is unknown, none is another
    service's, no value is wrong."""
    config = settings(overlay(name), service)
    others = {
        variable
        for variable in environment(overlay(name), service)
        if not variable.startswith(f"OUTRIDER_{service.upper()}_")
    }
    assert others <= {"HF_HUB_OFFLINE", *vars(environment_variables)}
    assert config.host == "0.0.0.0"
    assert config.log_format == "json"
    assert getattr(config, "name", f"{service}-0") == f"{service}-0"


def test_unknown_settings_would_be_found() -> None:
    """The check above fails on a variable that no setting has."""
    manifests = overlay("gpu")
    variables = environment(manifests, "verify") | {"OUTRIDER_VERIFY_MAX_NODE": "1"}
    arguments = _parser().parse_args(["serve", "verify"])
    with pytest.raises(ConfigError, match="OUTRIDER_VERIFY_MAX_NODE"):
        resolve("verify", PROGRAMS["verify"].config, arguments, variables)


@EVERYWHERE
def test_ports_are_the_settings_ports(name: str, service: str) -> None:
    """Container ports, Service ports and probe ports are those that the process listens on."""
    manifests = overlay(name)
    config = settings(manifests, service)
    ports = {port["name"]: port["containerPort"] for port in container(manifests, service)["ports"]}
    kind = "http" if service == "gateway" else "grpc"
    health = {} if service == "gateway" else {"health": config.health_port}
    assert ports == {kind: config.port, "metrics": config.metrics_port, **health}
    (published,) = of_kind(manifests, "Service")[service]["spec"]["ports"]
    assert (published["port"], published["targetPort"]) == (config.port, kind)


@OF_GRPC
def test_probes_ask_what_is_served(name: str, service: str) -> None:
    """Probes use the plaintext health port and names that a real server answers under."""
    manifests = overlay(name)
    config = settings(manifests, service)
    one = container(manifests, service)
    probes = {kind: one[kind]["grpc"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {probe["port"] for probe in probes.values()} == {config.health_port}
    assert probes["readinessProbe"]["service"] == "readiness"
    assert probes["livenessProbe"]["service"] == "liveness"
    assert {probe["service"] for probe in probes.values()} <= asyncio.run(_health_names())
    # An orchestrator without a verify replica waits for one; killing it would not bring one.
    assert probes["startupProbe"]["service"] == ("liveness" if service == "orchestrator" else "readiness")


async def _health_names() -> set[str]:
    """The names that health knows about a server that loads."""
    server = GrpcServer(ServiceConfig(), [])
    await server.start()
    names = set(server._health._serving)
    await server.stop()
    return names


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_gateways_probes_ask_what_is_served(name: str) -> None:
    """They ask the plaintext inner port, at paths that are there; only readiness needs an orchestrator."""
    one = container(overlay(name), "gateway")
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    probes = {kind: one[kind]["httpGet"] for kind in kinds}
    assert {(probe["port"], probe["scheme"]) for probe in probes.values()} == {("metrics", "HTTP")}
    assert [probes[kind]["path"] for kind in kinds] == ["/version", "/health", "/version"]
    assert {probe["path"] for probe in probes.values()} <= set(OPEN)


@pytest.mark.parametrize("name", OVERLAYS)
def test_gateways_find_every_orchestrator(name: str) -> None:
    """They ask for all pods' addresses, again before the connections are old, and spread their calls."""
    manifests = overlay(name)
    gateway: GatewayConfig = settings(manifests, "gateway")
    orchestrator: OrchestratorConfig = settings(manifests, "orchestrator")
    scheme, service, port = gateway.orchestrator.split(":")
    spec = of_kind(manifests, "Service")[service]["spec"]
    assert gateway.orchestrator.startswith(SEVERAL)
    assert scheme == "dns"
    assert spec["clusterIP"] == "None"
    assert spec["selector"] == of_kind(manifests, "Service")["orchestrator"]["spec"]["selector"]
    assert int(port) == spec["ports"][0]["port"] == orchestrator.port
    assert orchestrator.max_connection_seconds > 0
    assert gateway.deadline_seconds <= gateway.grace_seconds


@EVERYWHERE
def test_pods_get_the_time_that_a_drain_takes(name: str, service: str) -> None:
    """Kubernetes kills no pod before its preStop, its drain and its exit are over."""
    manifests = overlay(name)
    wait = container(manifests, service)["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = settings(manifests, service).grace_seconds
    assert pod(manifests, service)["terminationGracePeriodSeconds"] >= wait + drain + EXIT_SECONDS


@pytest.mark.parametrize("name", OVERLAYS)
def test_no_request_outlives_a_rollout(name: str) -> None:
    """An orchestrator drains as long as its longest request may take, and a lost verify pod leaves time for
    another to be found: the new pod's wait is shorter than what a request waits for it."""
    manifests = overlay(name)
    config: OrchestratorConfig = settings(manifests, "orchestrator")
    assert config.grace_seconds >= config.default_deadline_seconds
    found_after = 2 * config.discovery_seconds
    assert found_after < workload(manifests, "verify")["spec"]["minReadySeconds"] < config.recovery_seconds


@pytest.mark.parametrize("name", OVERLAYS)
def test_replicas_are_found_through_headless_services(name: str) -> None:
    """The names that orchestrators poll are headless Services with these ports: every ready pod is seen."""
    manifests = overlay(name)
    config: OrchestratorConfig = settings(manifests, "orchestrator")
    services = of_kind(manifests, "Service")
    for kind in ("verify", "draft"):
        (address,) = (Address.parse(kind, text) for text in getattr(config, kind))
        spec = services[address.host]["spec"]
        assert address.dns
        assert (address.host, address.port) == (kind, settings(manifests, kind).port)
        assert spec["clusterIP"] == "None"
        assert not spec.get("publishNotReadyAddresses", False)
    assert workload(manifests, "verify")["spec"]["serviceName"] == "verify"


@EVERYWHERE
def test_resources_fit_the_settings(name: str, service: str) -> None:
    """No more threads than requested cores; the memory asked for is the memory allowed."""
    manifests = overlay(name)
    resources = container(manifests, service)["resources"]
    config = settings(manifests, service)
    if isinstance(config, EngineConfig):
        assert config.threads <= quantity(resources["requests"]["cpu"])
        gpus = resources["limits"].get("nvidia.com/gpu", 0)
        assert (config.device == "cuda") == (int(gpus) == 1)
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize("service", ["verify", "draft"])
def test_models_come_from_where_they_are(name: str, service: str) -> None:
    """The model's folder is on the read-only weights volume, or in the image of the demo pair."""
    manifests = overlay(name)
    folder = Path(settings(manifests, service).model)
    one = container(manifests, service)
    mounts = {mount["mountPath"]: mount for mount in one["volumeMounts"]}
    if one["image"].startswith("outrider-demo:"):
        assert str(folder.parent) not in mounts
        assert (ROOT / "models/demo" / folder.name / "config.json").exists()
    else:
        assert mounts[str(folder.parent)]["readOnly"] is True
        volumes = {volume["name"]: volume for volume in pod(manifests, service)["volumes"]}
        claim = volumes[mounts[str(folder.parent)]["name"]]["persistentVolumeClaim"]
        assert claim == {"claimName": "weights", "readOnly": True}
        assert claim["claimName"] in of_kind(manifests, "PersistentVolumeClaim")


@pytest.mark.parametrize("service", SERVICES)
def test_tls_files_are_mounted(service: str) -> None:
    """Every TLS and token file that a setting names lies in a Secret that is mounted there."""
    manifests = overlay("everything")
    config = settings(manifests, service).model_dump()
    named = {Path(value) for key, value in config.items() if key.startswith(("tls_", "auth_")) and value}
    mounts = {
        Path(mount["mountPath"]): mount["name"] for mount in container(manifests, service)["volumeMounts"]
    }
    secrets = {one["name"]: one["secret"] for one in pod(manifests, service)["volumes"] if "secret" in one}
    assert named
    for file in named:
        assert file.name in ("tls.crt", "tls.key", "ca.crt", "tokens")
        assert mounts[file.parent] in secrets


def test_certificates_are_for_the_names_that_are_checked() -> None:
    """Each Secret of mutual TLS has a certificate; a replica's is for the name it is found under, and for
    what it is used as."""
    manifests = overlay("everything")
    by_secret = {one["spec"]["secretName"]: one["spec"] for one in of_kind(manifests, "Certificate").values()}
    config: OrchestratorConfig = settings(manifests, "orchestrator")
    for kind in ("verify", "draft"):
        (address,) = (Address.parse(kind, text) for text in getattr(config, kind))
        assert address.host in by_secret[f"{kind}-tls"]["dnsNames"]
        assert "server auth" in by_secret[f"{kind}-tls"]["usages"]
    assert "client auth" in by_secret["orchestrator-client-tls"]["usages"]


def test_keda_asks_the_orchestrator() -> None:
    """The trigger's address is the orchestrator's Service, and its authority is beside its certificate, which
    the page says is for that name."""
    manifests = overlay("everything")
    (trigger,) = of_kind(manifests, "ScaledObject")["draft"]["spec"]["triggers"]
    service = of_kind(manifests, "Service")["orchestrator"]
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert trigger["type"] == "external"
    assert trigger["metadata"] == {"scalerAddress": f"{host}:{service['spec']['ports'][0]['port']}"}
    (row,) = re.findall(r"^\| `orchestrator-tls`.*", (ROOT / "docs/kubernetes.md").read_text(), re.M)
    assert f"`{host}`" in row
    authority = of_kind(manifests, "TriggerAuthentication")[trigger["authenticationRef"]["name"]]
    (parameter,) = authority["spec"]["secretTargetRef"]
    mounted = [
        volume["secret"]["secretName"]
        for volume in pod(manifests, "orchestrator")["volumes"]
        if "secret" in volume
    ]
    assert parameter["parameter"] == "caCert"
    assert parameter["name"] in mounted


def test_the_hpa_scales_on_a_metric_that_is_exported(tmp_path: Path) -> None:
    """Its metric is a gauge of the orchestrator, and a number of pods already: KEDA gets the same name."""
    hpa = of_kind(compose(K8S / "base", ("hpa",), tmp_path), "HorizontalPodAutoscaler")["draft"]
    (metric,) = hpa["spec"]["metrics"]
    registry = CollectorRegistry()
    OrchestratorInstruments(registry)
    exported = {family.name: family.type for family in registry.collect()}
    assert exported.get(metric["external"]["metric"]["name"]) == "gauge"
    assert metric["external"]["metric"]["name"] == REPLICAS
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_gateways_scale_on_a_metric_that_is_exported(tmp_path: Path) -> None:
    """The autoscaler of the gateways asks for a gauge of theirs, and for less than one lets in."""
    manifests = compose(K8S / "base", ("hpa-gateway",), tmp_path)
    spec = of_kind(manifests, "HorizontalPodAutoscaler")["gateway"]["spec"]
    (metric,) = spec["metrics"]
    registry = CollectorRegistry()
    GatewayInstruments(registry)
    exported = {family.name: family.type for family in registry.collect()}
    assert exported.get(metric["pods"]["metric"]["name"]) == "gauge"
    assert int(metric["pods"]["target"]["averageValue"]) < MAX_CONNECTIONS
    assert spec["scaleTargetRef"]["name"] in of_kind(manifests, "Deployment")
    assert spec["minReplicas"] < spec["maxReplicas"]


def test_routes_lead_to_services() -> None:
    """The Gateway API's routes name Services and ports that are there, paths and methods that are served,
    and nothing that is for those inside."""
    manifests = overlay("everything")
    http, grpc = (of_kind(manifests, kind)["outrider"]["spec"] for kind in ("HTTPRoute", "GRPCRoute"))
    for route, service in ((http, "gateway"), (grpc, "orchestrator")):
        (rule,) = route["rules"]
        (backend,) = rule["backendRefs"]
        assert backend["name"] == service
        assert backend["port"] == settings(manifests, service).port
    paths = [match["path"]["value"] for match in http["rules"][0]["matches"]]
    reached = {path for path in ENDPOINTS if path.startswith(tuple(paths))}
    assert reached == set(ENDPOINTS) - set(OPEN)
    (match,) = grpc["rules"][0]["matches"]
    assert match["method"]["service"] == SERVICE


def test_keda_speaks_to_a_service_that_is_there() -> None:
    """The trigger's type is served: its methods are KEDA's, of its package and service, with its messages."""
    (trigger,) = of_kind(overlay("everything"), "ScaledObject")["draft"]["spec"]["triggers"]
    service = externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"]
    assert service.full_name == "externalscaler.ExternalScaler"
    served = {method.name for method in service.methods if method.name in vars(ScalerServicer)}
    assert served == {"IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics"}
    assert trigger["type"] in ("external", "external-push")


def test_pods_outlive_the_move_of_their_sessions() -> None:
    """A draft pod that goes is not listed any more; its sessions have left it before it must have ended."""
    for name in OVERLAYS:
        orchestrator: OrchestratorConfig = settings(overlay(name), "orchestrator")
        draft = settings(overlay(name), "draft")
        rounds = draft.max_sessions / MOVES
        assert 2 * orchestrator.discovery_seconds + rounds * orchestrator.discovery_seconds <= (
            container(overlay(name), "draft")["lifecycle"]["preStop"]["sleep"]["seconds"]
            + draft.grace_seconds
        )


def test_monitors_scrape_the_metrics_port() -> None:
    """The PodMonitor selects the pods of all services and a port that they have."""
    manifests = overlay("everything")
    spec = of_kind(manifests, "PodMonitor")["outrider"]["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    for service in SERVICES:
        labels = workload(manifests, service)["spec"]["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert endpoint["port"] in {port["name"] for port in container(manifests, service)["ports"]}


@pytest.mark.parametrize("service", GRPC_SERVICES)
def test_spans_go_to_the_collector(service: str) -> None:
    """The endpoint in the environment is the collector's Service, which receives on that port."""
    manifests = overlay("everything")
    collector = of_kind(manifests, "Service")[COLLECTOR]
    (port,) = collector["spec"]["ports"]
    variables = environment(manifests, service)
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://{COLLECTOR}:{port['port']}"
    ports = {one["name"]: one["containerPort"] for one in container(manifests, COLLECTOR)["ports"]}
    assert ports[port["targetPort"]] == port["port"]


def test_images_and_labels_are_of_this_version() -> None:
    """The version of the package is the tag of our images and the label of every object."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in OVERLAYS:
        for one in of_kind(overlay(name), *WORKLOADS).values():
            if one["metadata"]["name"] == COLLECTOR:
                continue
            (only,) = one["spec"]["template"]["spec"]["containers"]
            assert only["image"].endswith(f":{version}")
            assert one["metadata"]["labels"]["app.kubernetes.io/version"] == version
