"""A kustomize overlay for a pair that was sized: k8s/overlays/NAME/kustomization.yaml. Pure."""

from __future__ import annotations

from outrider.cli.plan.devices import CPU
from outrider.cli.plan.sizes import FP8
from outrider.cli.plan.sizing import Fit

KINDS = {"verify": "StatefulSet", "draft": "Deployment"}
FOLDERS = {"verify": "target", "draft": "draft"}


def overlay(target: Fit, draft: Fit, target_sessions: int, draft_sessions: int) -> str:
    """The text of the file; a replica takes `target_sessions` or `draft_sessions` at once."""
    fits = {"verify": (target, target_sessions), "draft": (draft, draft_sessions)}
    base = "../../base" if target.device.name == CPU else "../gpu"
    settings = [line for name, (one, most) in fits.items() for line in _settings(name, one, most)]
    patches = [line for name, (one, _) in fits.items() for line in _patch(name, one)]
    lines = [
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        "resources:",
        f"  - {base}",
        "configMapGenerator:",
        *settings,
        "patches:",
        *patches,
    ]
    return "\n".join(lines) + "\n"


def _settings(service: str, one: Fit, max_sessions: int) -> list[str]:
    values: dict[str, object] = {
        "MODEL": f"/models/{FOLDERS[service]}",
        "DTYPE": one.checkpoint.dtype,
        "CONTEXT_LENGTH": one.context,
        "KV_TOKENS": one.kv_tokens,
        "MAX_SESSIONS": max_sessions,
    }
    if one.checkpoint.weights not in ("full", FP8):
        values["WEIGHTS"] = one.checkpoint.weights
    if one.checkpoint.kv_dtype != "auto":
        values["KV_DTYPE"] = one.checkpoint.kv_dtype
    if service == "verify":
        values["SERVED_NAME"] = one.checkpoint.name
    literals = [f"      - OUTRIDER_{service.upper()}_{name}={value}" for name, value in values.items()]
    return [f"  - name: {service}", "    behavior: merge", "    literals:", *literals]


def _patch(service: str, one: Fit) -> list[str]:
    """A patch that sets the memory of the process and the kind of node."""
    memory = f"{-(-one.host_bytes // 2**30)}Gi"
    container = "/spec/template/spec/containers/0/resources"
    lines = [
        f"  - target: {{kind: {KINDS[service]}, name: {service}}}",
        "    patch: |-",
        *_replaced(f"{container}/requests/memory", memory),
        *_replaced(f"{container}/limits/memory", memory),
    ]
    if not one.device.product:
        return lines
    product = f"{{nvidia.com/gpu.product: {one.device.product}}}"
    return [
        *lines,
        "      - op: add",
        "        path: /spec/template/spec/nodeSelector",
        f"        value: {product}",
    ]


def _replaced(path: str, value: str) -> list[str]:
    return ["      - op: replace", f"        path: {path}", f"        value: {value}"]
