"""`outrider advise`: measures, simulates, and says which draft to take."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from outrider.cli.advise.findings import Findings, MeasuredDraft
from outrider.cli.advise.options import DraftOption, draft_options
from outrider.cli.advise.report import as_dict, render
from outrider.cli.bench.machine import describe
from outrider.cli.bench.prompts import read_labelled
from outrider.cli.files import check_output, write_file
from outrider.cli.named_models import check_vocabulary, naming
from outrider.cli.prompt_ids import token_ids_of
from outrider.cli.up.command import check_models
from outrider.cli.up.plan import MTP, UpConfig
from outrider.engine.loading.first_checks import check_skipped
from outrider.protocol.errors import ConfigError


def advise(arguments: argparse.Namespace) -> int:
    """Print the findings and the advice; write the figures to a file if the flags ask for it.

    Raises:
        ConfigError: a model cannot be loaded, or a draft does not fit the target.
        InvalidRequest: the prompts cannot be read.
    """
    _check_machine()
    if arguments.json:
        check_output("--json", arguments.json)
    options = draft_options(arguments)
    models = [option.draft for option in options]
    check_models(UpConfig.model_validate({"target": arguments.target, "draft": tuple(models)}))
    labelled = read_labelled(arguments.prompts)[: arguments.max_prompts]
    refuse_heads(options)
    for option in options:
        if option.is_model:
            check_vocabulary(arguments.target, option.draft)
            check_draft(option)
    ids = token_ids_of([entry.prompt for entry in labelled], arguments.target)
    findings = study(arguments, options, ids, tuple(entry.task for entry in labelled))
    print(render(findings))
    if arguments.json:
        write_file("--json", arguments.json, json.dumps(as_dict(findings), indent=1) + "\n")
    return 0


def study(
    arguments: argparse.Namespace,
    options: Sequence[DraftOption],
    prompts: Sequence[tuple[int, ...]],
    tasks: tuple[str, ...],
) -> Findings:
    """Measure the target and every draft, and simulate all loads.

    Raises:
        ConfigError: a model cannot be loaded, or does not fit.
    """
    from outrider.cli.advise.loads import load_of, simulate_all
    from outrider.cli.advise.measuring import TargetOnThisMachine, Traffic

    traffic = Traffic(prompts, arguments.tokens, arguments.temperature)
    target = TargetOnThisMachine(arguments.target, arguments.dtype, traffic)
    measured = [target.without(), *(target.measure(option) for option in options)]
    loads = [
        load_of(sessions, len(prompts), arguments.tokens, arguments.temperature)
        for sessions in arguments.sessions
    ]
    rates = simulate_all(measured, loads)
    return Findings(
        target=arguments.target,
        dtype=arguments.dtype,
        temperature=arguments.temperature,
        size=target.size,
        tasks=tasks,
        tokens=sum(len(text.tokens) for text in target.texts),
        longest=traffic.longest,
        without=rates[0],
        candidates=tuple(
            MeasuredDraft(option=one.option, size=one.size, runs=one.runs, rates=found)
            for one, found in zip(measured[1:], rates[1:], strict=True)
        ),
        machine=describe(),
    )


def refuse_heads(options: Sequence[DraftOption]) -> None:
    """Refuse drafts that read the target's features: the simulator only knows drafts that read tokens.

    Raises:
        ConfigError: a draft is such a head; names it.
    """
    from outrider.engine.heads.eagle_config import is_head
    from outrider.engine.loading.tokenizer_files import json_file

    for option in options:
        if option.draft == MTP:
            raise ConfigError(
                "--draft: an MTP layer is not simulated; leave it out, and compare real services with "
                "`outrider bench`"
            )
        if option.is_model and is_head(json_file(option.draft, "config.json")):
            raise ConfigError(
                f"--draft: {option.draft!r} is an EAGLE head, which is not simulated; leave it out, and "
                "compare real services with `outrider bench`"
            )


def check_draft(option: DraftOption) -> None:
    """Refuse a folder without weights, and layers that its model does not have, before the target is loaded.

    Raises:
        ConfigError: names the flag.
    """
    from outrider.engine.loading.open_weights import weight_files

    if Path(option.draft).is_dir():
        with naming("--draft"):
            weight_files(option.draft)
    with naming("--draft-skip-layers"):
        check_skipped(option.draft, option.skip_layers)


def _check_machine() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if cores < 2:
        raise ConfigError(
            "advise needs Linux and two cores, one for the target and one for the draft; "
            f"{cores or 'an unknown number'} can be used here"
        )
