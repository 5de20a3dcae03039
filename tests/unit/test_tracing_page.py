"""docs/tracing.md agrees with the conventions, its collector configuration with the manifests."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from opentelemetry.semconv import attributes as stable
from opentelemetry.semconv._incubating import attributes as incubating

from outrider.telemetry.rpc_spans import VERIFY
from tests.tracing_page import PAGE, documented
from tests.unit.test_architecture import ROOT

COMPONENT = ROOT / "k8s/components/otel"
CONVENTIONS = {
    value
    for package, names in (
        (incubating, ("gen_ai_attributes", "rpc_attributes")),
        (stable, ("error_attributes", "server_attributes")),
    )
    for name in names
    for value in vars(__import__(f"{package.__name__}.{name}", fromlist=[name])).values()
    if isinstance(value, str)
}
TAIL_SAMPLING = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]


def test_other_names_are_those_of_the_conventions() -> None:
    """What does not begin with `outrider.` is in the OpenTelemetry registry."""
    names = {name for attributes in documented().values() for name in attributes}
    assert {"gen_ai.usage.output_tokens", "rpc.method", "error.type", "server.port"} <= names
    assert {name for name in names if not name.startswith("outrider.")} <= CONVENTIONS


def test_every_span_has_a_table() -> None:
    """The spans of the overview, and no others."""
    assert set(documented()) == {
        *("text_completion MODEL", VERIFY, "prefill", "speculation.step"),
        *("verify.forward", "draft.expand", "continuation"),
    }


def merged() -> dict[str, Any]:
    """The component's configuration with the page's block, as a collector merges two files."""
    config: dict[str, Any] = yaml.safe_load((COMPONENT / "config.yaml").read_text())
    more = yaml.safe_load(TAIL_SAMPLING)
    assert set(more) == {"processors", "service"}
    config["processors"] |= more["processors"]
    config["service"]["pipelines"]["traces"] |= more["service"]["pipelines"]["traces"]
    return config


@pytest.mark.parametrize("config", [yaml.safe_load((COMPONENT / "config.yaml").read_text()), merged()])
def test_a_pipeline_uses_what_is_defined(config: dict[str, Any]) -> None:
    """Every receiver, processor, exporter and extension is defined, and everything defined is used."""
    service = config["service"]
    used = {
        "extensions": set(service["extensions"]),
        "receivers": set(),
        "processors": set(),
        "exporters": set(),
    }
    for pipeline in service["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            used[kind] |= set(pipeline[kind])
    assert used == {kind: set(config[kind]) for kind in used}
    assert config["exporters"]["otlp_grpc"]["endpoint"] == "${env:TRACES_ENDPOINT}"


def test_the_component_agrees_with_itself() -> None:
    """Services send where the collector listens; it has the backend's address and a port for its probes."""
    variables = dict(line.split("=", 1) for line in (COMPONENT / "services.env").read_text().split())
    config = yaml.safe_load((COMPONENT / "config.yaml").read_text())
    _, service, deployment = yaml.safe_load_all((COMPONENT / "collector.yaml").read_text())
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://{name}:{port}"
    assert variables["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(f":{ports['otlp']}")
    assert config["extensions"]["health_check"]["endpoint"].endswith(f":{ports['health']}")
    assert "TRACES_ENDPOINT=" in (COMPONENT / "collector.env").read_text()
