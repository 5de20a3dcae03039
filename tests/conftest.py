"""Shared by all tests: quiet libraries, the demo pair as services, and what `transformers` says.

The fixtures import what they need themselves, so that unit tests load neither torch nor grpc for them.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side; who wants more threads says so
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# A shell ignores SIGINT in what it starts in the background; the tests send it to themselves and to services.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run; on a busy machine none of them is fast.
settings.register_profile(
    "tests", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")
ASYNC_SECONDS = 300
"""Longest time of a test that is a coroutine."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own, bounded in time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**wanted), ASYNC_SECONDS))
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of our own."""
    parser.addoption("--fault-seed", type=int, help="replay the fault tests with this seed")


@pytest.fixture
def fault_seed(request: pytest.FixtureRequest) -> int | None:
    """The seed to replay, if one was given."""
    return request.config.getoption("--fault-seed")


@pytest.fixture(scope="session")
def reference():
    """The demo target run by plain `transformers`."""
    from tests.integration.cluster import DEMO_TARGET
    from tests.integration.reference import Reference

    return Reference(DEMO_TARGET)


@pytest.fixture(scope="session")
def prompts() -> Callable[[int], list[list[int]]]:
    """Token ids of so many different pieces of Python source."""
    from tests.integration.prompts import code_prompts

    return code_prompts


@pytest.fixture(scope="session")
def collector():
    """The OTLP receiver that all service processes export to."""
    from tests.integration.collector import Collector

    receiver = Collector()
    yield receiver
    receiver.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory, collector):
    """Processes that live as long as the test run."""
    from tests.integration.cluster import Cluster
    from tests.integration.collector import environment

    processes = Cluster(tmp_path_factory.mktemp("cluster"), environment(collector.endpoint))
    yield processes
    processes.stop()


@pytest.fixture
def own_cluster(tmp_path, collector):
    """Processes of one test, to be broken freely."""
    from tests.integration.cluster import Cluster
    from tests.integration.collector import environment

    processes = Cluster(tmp_path, environment(collector.endpoint))
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def demo(cluster, tmp_path_factory):
    """The demo pair as services; what a test does not ask for is not started."""
    from tests.integration.stack import DemoStack

    return DemoStack(cluster, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def up(tmp_path_factory):
    """`outrider up` on the demo pair, ready, with the OpenAI API.

    Who ends one of its processes waits until it is back. Who needs drafts asks for the sequential mode.
    """
    from tests.integration.cluster import demo_up

    with demo_up(tmp_path_factory.mktemp("up")) as process:
        yield process
