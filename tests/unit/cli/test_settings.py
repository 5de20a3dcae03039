"""Settings: precedence, sources, and errors that name the flag, the variable or the file key."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import pytest

from outrider.cli.serve import SERVICES
from outrider.cli.settings import Resolved, add_flags, flag_of, resolve
from outrider.cli.up.plan import UpConfig
from outrider.config import DraftConfig, GatewayConfig, OrchestratorConfig, Settings, VerifyConfig
from outrider.protocol.errors import ConfigError

TABLES: dict[str, type[Settings]] = {
    "verify": VerifyConfig,
    "draft": DraftConfig,
    "orchestrator": OrchestratorConfig,
    "gateway": GatewayConfig,
    "up": UpConfig,
}


def _parser(table: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, TABLES[table], table)
    return parser


def _resolve(
    *flags: str, table: str = "verify", environment: dict[str, str] | None = None
) -> Resolved[Settings]:
    return resolve(table, TABLES[table], _parser(table).parse_args(flags), environment or {})


def _file(tmp_path: Path, content: str) -> str:
    path = tmp_path / "outrider.toml"
    path.write_text(content)
    return str(path)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    """Each source wins over the ones behind it, and every value tells where it came from."""
    path = _file(tmp_path, "[verify]\nmax_sessions = 3\nthreads = 3\nkv_tokens = 3\n")
    environment = {"OUTRIDER_VERIFY_MAX_SESSIONS": "2", "OUTRIDER_VERIFY_THREADS": "2"}
    found = _resolve("--config", path, "--max-sessions", "1", environment=environment)
    config = found.config
    assert (config.max_sessions, config.threads, config.kv_tokens, config.max_nodes) == (1, 2, 3, 32)
    assert found.sources["max_sessions"] == "--max-sessions"
    assert found.sources["threads"] == "OUTRIDER_VERIFY_THREADS"
    assert found.sources["kv_tokens"] == f"{path} [verify] kv_tokens"
    assert found.sources["max_nodes"] == "default"
    assert found.given("kv_tokens")
    assert not found.given("max_nodes")


def test_a_flag_that_switches_off_is_the_source() -> None:
    """As it was given, and as it can be given again."""
    found = _resolve("--no-page", "--response-metrics", table="gateway")
    assert (found.sources["page"], found.sources["response_metrics"]) == ("--no-page", "--response-metrics")


def test_print_config_is_a_file_that_can_be_used(tmp_path: Path) -> None:
    """What is printed is TOML; read back, it gives the same settings."""
    found = _resolve("--model", 'a "quoted" name', "--no-lookup", "--lease-seconds", "1.5")
    path = _file(tmp_path, found.render())
    assert tomllib.loads(found.render())["verify"]["lookup"] is False
    assert _resolve("--config", path).config == found.config


@pytest.mark.parametrize("table", TABLES)
def test_every_field_is_a_documented_flag(table: str) -> None:
    """The flags are the fields: none is missing, none is extra, all have help and a default in it."""
    actions = _parser(table)._actions
    flags = {action.option_strings[0] for action in actions} - {"-h", "--config", "--print-config"}
    assert flags == {flag_of(name) for name in TABLES[table].model_fields}
    for action in actions:
        assert action.help, action.option_strings


def test_every_service_is_served_with_its_own_settings() -> None:
    """The commands and the settings classes belong together."""
    assert {service: program.config for service, program in SERVICES.items()} == {
        name: config for name, config in TABLES.items() if name != "up"
    }


def test_lists_come_repeated_separated_or_as_arrays(tmp_path: Path) -> None:
    """Several replicas can be named in the way that suits each source."""
    expected = ("a:1", "b:2")
    path = _file(tmp_path, '[orchestrator]\nverify = ["a:1", "b:2"]\n')
    for found in (
        _resolve("--verify", "a:1", "--verify", "b:2", table="orchestrator"),
        _resolve("--verify", "a:1, b:2", table="orchestrator"),
        _resolve(table="orchestrator", environment={"OUTRIDER_ORCHESTRATOR_VERIFY": "a:1,b:2"}),
        _resolve("--config", path, table="orchestrator"),
    ):
        assert found.config.verify == expected


def test_the_config_file_can_come_from_the_environment(tmp_path: Path) -> None:
    """Containers set OUTRIDER_CONFIG once."""
    path = _file(tmp_path, "[verify]\nthreads = 4\n[draft]\nthreads = 2\n")
    assert _resolve(environment={"OUTRIDER_CONFIG": path}).config.threads == 4


def test_service_links_of_kubernetes_are_not_settings() -> None:
    """A cluster that has a service `outrider-verify` injects variables that look like ours."""
    links = {
        "OUTRIDER_VERIFY_SERVICE_HOST": "10.0.0.1",
        "OUTRIDER_VERIFY_SERVICE_PORT_GRPC": "7701",
        "OUTRIDER_VERIFY_PORT_7701_TCP_ADDR": "10.0.0.1",
    }
    assert _resolve(environment=links).config == VerifyConfig()


def test_other_variables_with_our_prefix_are_left_alone() -> None:
    """Scripts around us have variables of their own."""
    others = {"OUTRIDER_HOME": "/srv", "OUTRIDER_IMAGE_TAG": "1", "OUTRIDER_DRAFTS": "2", "OUTRIDER": "3"}
    assert _resolve(environment=others).config == VerifyConfig()


def test_wrong_values_name_their_source(tmp_path: Path) -> None:
    """One sentence says which flag, variable or key to change, and what was found there."""
    path = _file(tmp_path, '[verify]\nmax_sessions = "many"\n')
    cases = [
        (["--max-sessions", "0"], {}, "--max-sessions: must be above 0, not '0'"),
        ([], {"OUTRIDER_VERIFY_THREADS": "two"}, "OUTRIDER_VERIFY_THREADS: must be a whole number, not"),
        (["--config", path], {}, f"{path} [verify] max_sessions: must be a whole number, not"),
        (["--dtype", "int3"], {}, "--dtype: must be 'auto', 'float32', 'bfloat16' or 'float16', not 'int3'"),
        ([], {"OUTRIDER_VERIFY_MAX_SESSION": "2"}, "OUTRIDER_VERIFY_MAX_SESSION: no setting"),
        ([], {"OUTRIDER_VERFY_PORT": "2"}, "OUTRIDER_VERFY_PORT: no service has this name; did you mean OUT"),
        (["--config", "/none.toml"], {}, "--config: cannot read '/none.toml'"),
        (["--threads", "-1"], {}, "--threads: must be 0 or more, not '-1'"),
        (["--port", "70000"], {}, "--port: must be 65535 or less, not '70000'"),
        (["--port", "-5"], {}, "--port: must be 0 or more, not '-5'"),
        (["--lease-seconds", "1e18"], {}, "--lease-seconds: must be 1000000000.0 or less, not '1e18'"),
        (["--grace-seconds", "inf"], {}, "--grace-seconds: must be a finite number, not 'inf'"),
    ]
    for flags, environment, sentence in cases:
        with pytest.raises(ConfigError) as refusal:
            _resolve(*flags, environment=environment)
        assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize(
    ("table", "flag", "value", "sentence"),
    [
        ("up", "--draft-skip-layers", "x", "must be a list of layers such as 4-9 or 2,5-7, not 'x'"),
        ("up", "--context-length", str(2**40), f"must be {2**31} or less, not '{2**40}'"),
        ("up", "--device", "gpu", "must be auto, cpu, cuda or cuda:N, not 'gpu'"),
        ("up", "--draft-device", "cuda:", "must be auto, cpu, cuda or cuda:N, not 'cuda:'"),
        ("draft", "--skip-layers", "7-5", "must be a list of layers such as 4-9 or 2,5-7, not '7-5'"),
        ("verify", "--device", "cuda0", "must be auto, cpu, cuda or cuda:N, not 'cuda0'"),
    ],
)
def test_what_no_service_would_take_is_refused_before_anything_is_loaded(
    table: str, flag: str, value: str, sentence: str
) -> None:
    """The settings are refused themselves; no process waits for torch to say it."""
    with pytest.raises(ConfigError) as refusal:
        _resolve(flag, value, table=table)
    assert str(refusal.value) == f"{flag}: {sentence}"


def test_devices_that_are_named_as_documented_are_taken() -> None:
    """Also the empty one of the draft."""
    for device in ("auto", "cpu", "cuda", "cuda:3"):
        assert _resolve("--device", device).config.model_dump()["device"] == device
    assert _resolve("--draft-device", "", table="up").config.model_dump()["draft_device"] == ""


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[verify]\nmax_session = 3\n", "[verify] max_session is not a setting"),
        ("[verfy]\nmax_sessions = 3\n", "verfy is not a table of ours"),
        ("verify = 3\n", "verify must be a table"),
        ("[verify\n", "is not valid TOML"),
        (f"verify = {'[' * 10_000}", "in each other too deeply"),
    ],
)
def test_mistakes_in_a_file_are_errors(tmp_path: Path, content: str, sentence: str) -> None:
    """A typo never passes as a setting that was not made."""
    with pytest.raises(ConfigError) as refusal:
        _resolve("--config", _file(tmp_path, content))
    assert sentence in str(refusal.value)


def test_help_shows_an_empty_default_as_empty() -> None:
    """As descriptions call it; `none` is a value of some settings, and a wrong one of these."""
    shown = " ".join(_parser("up").format_help().split())
    assert "empty: as device. Default: empty." in shown
