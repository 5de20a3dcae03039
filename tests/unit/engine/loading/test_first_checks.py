"""What a replica refuses before it listens or loads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from draft_service import main as draft
from outrider.config import DraftConfig, EngineConfig, VerifyConfig
from outrider.engine.loading.first_checks import check_settings
from outrider.protocol.errors import ConfigError
from verify_service import main as verify

DEMO = str(Path(__file__).resolve().parents[4] / "models" / "demo" / "target")
WRONG: list[tuple[type[EngineConfig], dict[str, Any], str]] = [
    (VerifyConfig, {"model": "/nowhere"}, "model: there is no folder '/nowhere'"),
    (VerifyConfig, {"model": DEMO, "helper_cpus": "4096"}, "helper_cpus: '4096' is not a list of cores"),
    (DraftConfig, {"model": DEMO, "skip_layers": "6"}, "skip_layers: the model has the layers 0 to 5"),
    (DraftConfig, {"model": DEMO, "skip_layers": "0-5"}, "skip_layers: .* one at least must stay"),
    (DraftConfig, {"model": DEMO, "kind": "eagle"}, "target: not set"),
]


@pytest.mark.parametrize(("kind", "settings", "sentence"), WRONG)
def test_settings_that_cannot_be_right_are_refused_before_anything_listens(
    kind: type[EngineConfig], settings: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No log line says that the replica listens."""
    module: Any = verify if kind is VerifyConfig else draft
    monkeypatch.setattr(module, "run_service", None)
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        asyncio.run(module.run(kind(**settings)))


def test_layers_are_counted_in_the_text_part(tmp_path: Path) -> None:
    """Models that also see have their layers there."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 3}}))
    check_settings(DraftConfig(model=str(tmp_path), skip_layers="2"))
    with pytest.raises(ConfigError, match="0 to 2"):
        check_settings(DraftConfig(model=str(tmp_path), skip_layers="3"))


@pytest.mark.parametrize(
    "config",
    [
        DraftConfig(kind="lookup", skip_layers="9"),
        DraftConfig(model="owner/name", skip_layers="9"),
        DraftConfig(model=DEMO, skip_layers="0-4"),
        VerifyConfig(model=DEMO, helper_cpus="0"),
    ],
)
def test_what_may_be_right_is_left_to_the_load(config: EngineConfig) -> None:
    """The layers of a model on the hub are not known yet."""
    check_settings(config)
