"""Which processes `outrider up` starts, with which flags, on which cores."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from outrider.cli.settings import Resolved, add_flags, resolve
from outrider.cli.up.plan import UpConfig, plan_gateway, plan_orchestrator, plan_replicas, share_cores
from outrider.config import DraftConfig, GatewayConfig, Settings, VerifyConfig
from outrider.cores import Cores
from outrider.protocol.errors import ConfigError


def _resolved(*flags: str) -> Resolved[UpConfig]:
    parser = argparse.ArgumentParser()
    add_flags(parser, UpConfig, "up")
    return resolve("up", UpConfig, parser.parse_args(flags), {})


def _settings(service: str, arguments: tuple[str, ...]) -> Any:
    """The child's own reading of its flags."""
    kind: type[Settings] = {
        "verify": VerifyConfig,
        "draft": DraftConfig,
        "gateway": GatewayConfig,
    }[service]
    parser = argparse.ArgumentParser()
    add_flags(parser, kind, service)
    return resolve(service, kind, parser.parse_args(arguments), {}).config


def _machine(cores: int) -> Cores:
    return Cores(tuple(range(cores)), cores)


def _plan(*flags: str, cores: int = 2, gpu: bool = False, machine: Cores | None = None) -> dict[str, Any]:
    specs = plan_replicas(_resolved(*flags), machine or _machine(cores), gpu)
    return {spec.name: _settings(spec.service, spec.arguments) for spec in specs}


def test_a_pair_on_two_cores() -> None:
    """Draft and target run at once, so each gets a core of its own."""
    plan = _plan("--target", "big", "--draft", "small", "--dtype", "float32")
    assert list(plan) == ["verify-0", "draft-0"]
    assert (plan["verify-0"].model, plan["draft-0"].model) == ("big", "small")
    assert (plan["verify-0"].cpus, plan["draft-0"].cpus) == ("0", "1")
    assert (plan["verify-0"].helper_cpus, plan["draft-0"].helper_cpus) == ("1", "")
    assert plan["verify-0"].dtype == plan["draft-0"].dtype == "float32"
    assert plan["verify-0"].name == "verify-0"


def test_the_context_is_that_of_all_replicas() -> None:
    """Where it was asked for: a model may name none."""
    flags = ("--target", "big", "--draft", "small,lookup")
    plan = _plan(*flags, "--context-length", "2048")
    assert {settings.context_length for settings in plan.values()} == {2048}
    plain = plan_replicas(_resolved(*flags), _machine(2), False)
    assert not any("--context-length" in spec.arguments for spec in plain)


def test_lookup_and_no_drafts() -> None:
    """`lookup` needs no model; `none` starts no draft at all."""
    plan = _plan("--target", "big", "--draft", "lookup")
    assert plan["draft-0"].kind == "lookup"
    assert list(_plan("--target", "big", "--draft", "none", "--drafts", "3")) == ["verify-0"]


def test_none_stands_alone() -> None:
    """A draft that was named beside it would silently be left out."""
    with pytest.raises(ConfigError, match="--draft: none means that there are no drafts; leave it or the"):
        _plan("--target", "big", "--draft", "none", "--draft", "small")


def test_an_empty_list_of_drafts_is_refused() -> None:
    """In a sentence of ours: an environment file may leave the variable empty."""
    with pytest.raises(ConfigError, match=r"^--draft: must have at least one entry$"):
        _plan("--target", "big", "--draft", "")


def test_the_targets_own_mtp_layer() -> None:
    """It is in the target's checkpoint; what rounds draft models does not reach it."""
    draft = _plan("--target", "big", "--draft", "mtp", "--draft-weights", "int8")["draft-0"]
    assert (draft.kind, draft.model, draft.weights) == ("mtp", "big", "full")


def test_a_part_of_the_target_may_be_the_draft() -> None:
    """Without some layers, with rounded weights; only what was asked for is passed on."""
    flags = ("--target", "big", "--draft", "big", "--draft-skip-layers", "4-9", "--draft-weights", "int8")
    draft = _plan(*flags)["draft-0"]
    assert (draft.model, draft.skip_layers, draft.weights) == ("big", "4-9", "int8")
    plain = plan_replicas(_resolved("--target", "big", "--draft", "small"), _machine(2), False)
    assert _plan("--target", "big", "--draft", "head")["draft-0"].target == "big", "for an EAGLE head"
    assert not {"--weights", "--skip-layers"} & set(plain[1].arguments)


def test_skipped_layers_need_the_target_as_a_draft() -> None:
    """No other draft is asked to do without; silence would hide that."""
    for draft in ("small", "lookup"):
        with pytest.raises(ConfigError, match=r"--draft-skip-layers: .* add --draft big"):
            _plan("--target", "big", "--draft", draft, "--draft-skip-layers", "4-9")


def test_the_target_may_be_rounded_alone() -> None:
    """Its weights and the draft's are told apart."""
    plan = _plan("--target", "big", "--draft", "small", "--weights", "int4")
    assert (plan["verify-0"].weights, plan["draft-0"].weights) == ("int4", "full")


def test_keys_and_values_of_the_target_may_have_8_bits_alone() -> None:
    """Or the draft's; who does not ask gets no flag."""
    plan = _plan("--target", "big", "--draft", "small", "--kv-dtype", "fp8")
    assert (plan["verify-0"].kv_dtype, plan["draft-0"].kv_dtype) == ("fp8", "auto")
    plan = _plan("--target", "big", "--draft", "small", "--draft-kv-dtype", "fp8")
    assert (plan["verify-0"].kv_dtype, plan["draft-0"].kv_dtype) == ("auto", "fp8")


def test_drafts_of_several_kinds() -> None:
    """Each kind gets its replicas; only the target itself does without layers."""
    kinds = ("--draft", "small", "--draft", "big,lookup")
    plan = _plan("--target", "big", *kinds, "--drafts", "2", "--draft-skip-layers", "4-9", cores=8)
    drafts = [plan[f"draft-{number}"] for number in range(6)]
    assert [(draft.kind, draft.model) for draft in drafts[::2]] == [
        ("model", "small"),
        ("model", "big"),
        ("lookup", ""),
    ]
    assert [draft.skip_layers for draft in drafts] == ["", "", "4-9", "4-9", "", ""]
    assert list(_plan("--target", "big", "--draft", "none")) == ["verify-0"]


def test_how_many_drafts_a_session_has_is_the_orchestrators() -> None:
    """Passed on where it was asked for."""
    asked = plan_orchestrator(
        _resolved("--target", "b", "--drafts-per-session", "2"), "file", [], _machine(0)
    )
    assert "--drafts-per-session" in asked.arguments
    assert "--drafts-per-session" not in plan_orchestrator(_resolved(), "file", [], _machine(0)).arguments


def test_what_is_collected_is_the_orchestrators() -> None:
    """Nothing is, unless a folder is named."""
    asked = plan_orchestrator(
        _resolved("--collect", "kept", "--collect-share", "0.5"), "file", [], _machine(0)
    )
    at = asked.arguments.index("--collect")
    assert asked.arguments[at : at + 4] == ("--collect", "kept", "--collect-share", "0.5")
    assert "--collect" not in plan_orchestrator(_resolved(), "file", [], _machine(0)).arguments


def test_a_target_without_drafts_is_helped_on_a_spare_core() -> None:
    """As many as it has threads; where there is none it works alone."""
    alone = ("--target", "big", "--draft", "none")
    assert _plan(*alone)["verify-0"].helper_cpus == "1"
    assert _plan(*alone, "--threads", "2", cores=8)["verify-0"].helper_cpus == "2,3"
    assert _plan(*alone, cores=1)["verify-0"].helper_cpus == ""
    assert _plan(*alone, "--cpus", "off")["verify-0"].helper_cpus == ""


def test_hardware_threads_of_a_target_s_own_cores_do_not_help_it() -> None:
    """They would slow their siblings down; of four physical cores, one is spare."""
    four = Cores((0, 2, 4, 6, 1, 3, 5, 7), 4)
    plan = _plan("--target", "big", "--draft", "none", machine=four)
    assert (plan["verify-0"].cpus, plan["verify-0"].helper_cpus) == ("0,2,4", "6")


def test_several_replicas() -> None:
    """Draft and target scale separately."""
    plan = _plan("--target", "big", "--draft", "small", "--verifies", "2", "--drafts", "3", cores=8)
    assert list(plan) == ["verify-0", "verify-1", "draft-0", "draft-1", "draft-2"]
    assert len({config.cpus for config in plan.values()}) == 5


@pytest.mark.parametrize(
    ("flags", "cores", "gpu"),
    [
        (("--cpus", "off"), 2, False),
        (("--device", "cuda"), 2, True),
        ((), 2, True),
        ((), 1, False),
        (("--threads", "2"), 3, False),
    ],
)
def test_pinned_only_where_it_helps(flags: tuple[str, ...], cores: int, gpu: bool) -> None:
    """Not when told not to, not on a GPU, and not with too few cores to go round."""
    plan = _plan("--target", "big", "--draft", "small", *flags, cores=cores, gpu=gpu)
    assert {config.cpus for config in plan.values()} == {""}


def test_threads_get_cores_of_their_own() -> None:
    """Two threads are two cores."""
    assert share_cores([0, 1, 2, 3], [2, 2]) == [(0, 1), (2, 3)]
    assert share_cores([0, 1, 2, 3], [3, 1]) == [(0, 1, 2), (3,)]
    assert share_cores([0, 1], [2, 1]) == [(), ()]


@pytest.mark.parametrize(
    ("flags", "cores", "expected"),
    [
        (("--draft", "small"), 1, [1, 1]),
        (("--draft", "small"), 2, [1, 1]),
        (("--draft", "small"), 4, [3, 1]),
        (("--draft", "small"), 16, [12, 4]),
        (("--draft", "small", "--drafts", "2"), 16, [12, 2, 2]),
        (("--draft", "small", "--verifies", "2"), 16, [6, 6, 4]),
        (("--draft", "small,lookup"), 16, [11, 4, 1]),
        (("--draft", "lookup"), 16, [15, 1]),
        (("--draft", "none"), 16, [15]),
        (("--draft", "small", "--tensor-parallel", "3"), 16, [4, 4]),
        (("--draft", "small", "--threads", "5"), 16, [5, 5]),
    ],
)
def test_the_cores_are_shared_out(flags: tuple[str, ...], cores: int, expected: list[int]) -> None:
    """A quarter for drafts that are models, one for a lookup, and one for the orchestrator if that runs
    alone; targets share the rest, also those without cores of their own."""
    plan = _plan("--target", "big", *flags, "--cpus", "off", cores=cores)
    assert [config.threads for config in plan.values()] == expected


def test_a_replica_with_cores_counts_them_itself() -> None:
    """So that its own settings may say otherwise."""
    plan = _plan("--target", "big", "--draft", "small", cores=8)
    assert [(config.cpus, config.threads) for config in plan.values()] == [("0,1,2,3,4,5", 0), ("6,7", 0)]
    assert plan["verify-0"].helper_cpus == "6,7"


def test_replicas_in_a_container_with_a_limit_are_not_pinned() -> None:
    """Its cores belong to other containers too; the threads are as many as the limit."""
    plan = _plan("--target", "big", "--draft", "small", machine=Cores((), 8))
    assert [(config.cpus, config.threads) for config in plan.values()] == [("", 6), ("", 2)]


def test_a_target_in_ranks_has_cores_for_all_of_them() -> None:
    """As many as all its ranks have threads; the drafts' cores do not help, and drafts are not divided."""
    flags = ("--target", "b", "--draft", "s", "--tensor-parallel", "2", "--threads", "2")
    plan = _plan(*flags, cores=6)
    assert (plan["verify-0"].tensor_parallel, plan["verify-0"].cpus) == (2, "0,1,2,3")
    assert plan["verify-0"].helper_cpus == ""
    assert plan["draft-0"].cpus == "4,5"


def test_the_draft_may_have_its_own_device() -> None:
    """Two GPUs: one each."""
    plan = _plan("--target", "b", "--draft", "s", "--device", "cuda:0", "--draft-device", "cuda:1", gpu=True)
    assert (plan["verify-0"].device, plan["draft-0"].device) == ("cuda:0", "cuda:1")


def test_no_process_starts_with_arithmetic_that_does_not_exist() -> None:
    """The mistake is named once, not by each replica."""
    with pytest.raises(ConfigError, match="--dtype: must be 'auto', 'float32'"):
        _resolved("--target", "big", "--dtype", "int9")


def test_only_what_was_asked_for_is_passed_on() -> None:
    """Defaults of `up` do not hide what the file's tables say."""
    specs = plan_replicas(_resolved("--target", "big"), _machine(2), gpu=False)
    for flag in ("--dtype", "--threads", "--grace-seconds", "--log-level", "--device"):
        assert flag not in specs[0].arguments


def test_the_orchestrator_reads_the_replicas_from_a_file() -> None:
    """A restarted replica has another port; the file says which. What was named has to fit together."""
    spec = plan_orchestrator(_resolved("--target", "big", "--port", "7801"), "/run/replicas", [], _machine(0))
    assert spec.arguments[:4] == ("--host", "127.0.0.1", "--port", "7801")
    assert spec.arguments[4:7] == ("--replicas-file", "/run/replicas", "--require-fit")


@pytest.mark.parametrize(
    ("cores", "expected"), [([0, 1], ("--cpus", "1")), ([0], ()), ([4, 5, 6, 7], ("--cpus", "7"))]
)
def test_the_orchestrator_stays_off_the_target_s_cores(cores: list[int], expected: tuple[str, ...]) -> None:
    """What it does for one request must not slow down the step of all; without a pinned target it floats."""
    resolved = _resolved("--target", "big", "--draft", "small")
    machine = Cores(tuple(cores), len(cores))
    replicas = plan_replicas(resolved, machine, gpu=False)
    assert plan_orchestrator(resolved, "/run/replicas", replicas, machine).arguments[7:] == expected


def test_a_target_is_needed() -> None:
    """There is nothing to serve without one."""
    with pytest.raises(ConfigError, match="--target"):
        _plan("--draft", "small")


@pytest.mark.parametrize(
    ("flags", "expected"), [((), False), (("--deterministic",), True), (("--no-deterministic",), False)]
)
def test_deterministic_is_the_targets(flags: tuple[str, ...], expected: bool) -> None:
    """Verify replicas get the flag as it was given; drafts, whose bits matter to nobody, do not know it."""
    plan = _plan("--target", "big", "--draft", "small", "--verifies", "2", *flags)
    assert [plan[name].deterministic for name in ("verify-0", "verify-1")] == [expected] * 2
    assert "deterministic" not in type(plan["draft-0"]).model_fields


@pytest.mark.parametrize("text", ["0", "-1", "two", "1..4", "1.5"])
def test_drafts_that_make_no_sense_are_refused(text: str) -> None:
    """With the flag's name, and what it takes."""
    with pytest.raises(ConfigError, match=r"--drafts: "):
        _resolved("--target", "big", f"--drafts={text}")


def test_the_gateway_gets_its_socket_and_keeps_off_the_targets_core() -> None:
    """As the orchestrator does; what they have in common is passed on."""
    resolved = _resolved("--target", "big", "--draft", "small", "--grace-seconds", "3")
    cores = _machine(2)
    replicas = plan_replicas(resolved, cores, gpu=False)
    spec = plan_gateway(resolved, 5, replicas, cores)
    config = _settings("gateway", spec.arguments)
    assert (spec.sockets, config.listen_fd, config.cpus, config.grace_seconds) == ((5,), 5, "1", 3.0)


def test_the_gateway_knows_how_the_model_writes() -> None:
    """Only where it was said, so that its own settings count otherwise."""
    said = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
    for given, expected in ((said, ("hermes", "think")), ((), ("none", "none"))):
        spec = plan_gateway(_resolved("--target", "big", *given), 5, (), _machine(1))
        config = _settings("gateway", spec.arguments)
        assert (config.tool_call_parser, config.reasoning_parser) == expected
        assert bool(given) == ("--tool-call-parser" in spec.arguments)
