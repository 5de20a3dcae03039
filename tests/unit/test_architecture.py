"""The walls of the project: who may import whom, and the shape of the files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("orchestrator", "draft_service", "verify_service")
GENERATED = ("v1", "internal")
"""Packages of `outrider` that are made from protos."""
MAX_FILE = 500
KNOWS_GENERATED_CODE = (
    *(
        "outrider/protocol/kv_wire.py",
        "outrider/protocol/sampling_wire.py",
        "outrider/protocol/wire.py",
        "outrider/client/event_wire.py",
        "outrider/client/wire.py",
        "orchestrator/request/chat_wire.py",
        "orchestrator/request/wire.py",
        "orchestrator/replicas/kv_relay.py",
        "orchestrator/replicas/probe.py",
    ),
    *("orchestrator/replicas/draft_client.py", "orchestrator/replicas/verify_client.py"),
    "orchestrator/observing/scaler_servicer.py",
    "outrider/rpc/draft_admin.py",
    *(f"{service}/{file}.py" for service in SERVICES for file in ("main", "servicer")),
)
"""Where messages enter and leave, and where servicers are registered."""


def sources(*folders: str) -> list[Path]:
    """Our own Python files below folders; generated code left out."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [
        path for path in found if not name(path).startswith(tuple(f"outrider/{made}/" for made in GENERATED))
    ]


def name(path: Path) -> str:
    """The path from the root, with slashes."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere; `from a import b` counts as a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offenders(paths: list[Path], *forbidden: str) -> list[str]:
    """Imports of forbidden packages, as `file imports module`."""
    return [
        f"{name(path)} imports {module}"
        for path in paths
        for module in imports(path)
        if any(module == package or module.startswith(package + ".") for package in forbidden)
    ]


@pytest.mark.parametrize("service", SERVICES)
def test_services_never_import_each_other(service):
    """A service knows `outrider` and itself."""
    assert not offenders(sources(service), *(other for other in SERVICES if other != service))


def test_the_shared_package_imports_no_service():
    """`outrider` can be used without any service; only the command line starts them."""
    shared = [path for path in sources("outrider") if not name(path).startswith("outrider/cli/")]
    assert not offenders(shared, *SERVICES)


def test_only_advise_knows_the_simulator():
    """It is a tool: no service and no library needs it. The rest of the command line starts without it."""
    heavy = [f"outrider/cli/advise/{file}.py" for file in ("measuring", "loads")]
    others = [path for path in sources("outrider", *SERVICES) if name(path) not in heavy]
    assert not offenders(others, "simulator")
    importing = {
        name(path)
        for path in sources("outrider")
        if offenders([path], *(file.removesuffix(".py").replace("/", ".") for file in heavy))
    }
    assert importing <= {"outrider/cli/advise/command.py", "outrider/cli/advise/loads.py"}


def test_the_simulator_needs_nothing_that_is_not_installed():
    """It is installed with the services, and without the rest of the repository."""
    assert not offenders(sources("simulator"), "scripts", "benchmarks", "tests", "outrider.cli")


def test_generated_code_is_touched_in_few_places():
    """Protobuf messages stay in servicers, clients and the `wire` modules."""
    others = [path for path in sources("outrider", *SERVICES) if name(path) not in KNOWS_GENERATED_CODE]
    assert not offenders(others, *(f"outrider.{package}" for package in GENERATED))


def test_domain_code_knows_no_transport():
    """State machines and domain types import neither grpc nor asyncio."""
    sessions = [f"{service}/session.py" for service in SERVICES]
    schedulers = ["verify_service/scheduler.py", "draft_service/scheduler.py"]
    shared = [
        "outrider/protocol/messages.py",
        "outrider/protocol/errors.py",
        "outrider/speculation/candidate_tree.py",
        "outrider/speculation/lookup.py",
        "outrider/speculation/acceptance.py",
    ]
    pure = [*shared, *sessions, *schedulers]
    assert not offenders([ROOT / path for path in pure], "grpc", "asyncio", "time", "threading")


def test_no_wait_swallows_a_cancel():
    """`asyncio.wait_for` may, on Python 3.11, when what it waits for comes in the same moment."""
    assert not offenders(sources("outrider", *SERVICES), "asyncio.wait_for")
    calls = [
        f"{name(path)}:{node.lineno}"
        for path in sources("outrider", *SERVICES)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    ]
    assert not calls


@pytest.mark.parametrize("module", ["orchestrator.main", "orchestrator.gateway.main", "outrider.cli.main"])
def test_the_orchestrator_starts_without_torch(module):
    """Importing the orchestrator, the gateway or the command line loads neither torch nor transformers."""
    program = (
        f"import sys, {module}\n"
        "heavy = ('torch', 'transformers', 'numpy', 'numba', 'simulator')\n"
        "sys.exit(', '.join(m for m in heavy if m in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", ["outrider", *SERVICES, "simulator", "tests", "scripts", "benchmarks"])
def test_files_are_short(folder):
    """A file that needs more than 500 lines has more than one reason to change."""
    lengths = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources(folder)}
    assert not {path: length for path, length in lengths.items() if length > MAX_FILE}


@pytest.mark.parametrize("package", ["outrider/engine", "outrider/cli", "simulator"])
def test_large_packages_list_their_modules(package):
    """A package of more than twelve modules says in its docstring what each is for."""
    for first in sorted((ROOT / package).rglob("__init__.py")):
        modules = {path.stem for path in first.parent.glob("*.py")} - {"__init__"}
        if len(modules) > 12 and first.parent.name != "kernels":  # docs/kernels.md lists those
            listed = set(re.findall(r"\w+", ast.get_docstring(tree(first)) or ""))
            assert not modules - listed, f"{name(first)} does not list {modules - listed}"


def test_every_test_says_what_it_shows():
    """Each test has a docstring: the behaviour, as a sentence."""
    silent = [
        f"{name(path)}:{node.lineno} {node.name}"
        for path in sources("tests")
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert not silent


@pytest.mark.parametrize(("page", "least"), [("README.md", 15), ("docs/architecture.md", 8)])
def test_every_name_that_a_page_walks_along_is_where_it_says(page: str, least: int) -> None:
    """A file and what is defined in it: `path.py`: `Class.method`."""
    named = re.findall(r"`([\w/]+\.py)`:\s+`([\w.]+)`", (ROOT / page).read_text())
    assert len(named) > least
    for path, name in named:
        body = ast.parse((ROOT / path).read_text()).body
        for part in name.split("."):
            found = [node for node in body if isinstance(node, _DEFINITIONS) and node.name == part]
            assert found, f"{path} defines no {name}"
            body = found[0].body


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
