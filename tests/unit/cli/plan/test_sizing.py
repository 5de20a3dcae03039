"""What fits on a device, and the least time of a step."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cli.main import main
from outrider.cli.plan.devices import CPU, GB, GPUS, Device, device_of
from outrider.cli.plan.overlay import overlay
from outrider.cli.plan.sizes import ModelSizes
from outrider.cli.plan.sizing import HEADROOM, NODES, PROCESS_BYTES, fit, replicas_for
from outrider.engine.kv.capacity import PAGE_SIZE
from outrider.protocol.errors import ConfigError


def model(**changes: Any) -> ModelSizes:
    """Eight billion weights of which all are read, 128 KiB of keys and values for each token."""
    sizes: dict[str, Any] = {
        "name": "eight",
        "dtype": "bfloat16",
        "parameters": 8 * GB,
        "looked_up": 0,
        "kv_numbers": 32 * 8 * (128 + 128),
        "context_length": 8192,
        "vocabulary_size": 1000,
    }
    return ModelSizes(**sizes | changes)


BIG = Device("big", 80 * GB, 2000.0 * GB)


def test_pages_fill_what_the_weights_leave() -> None:
    """Whole pages beside weights and headroom; one more would not fit."""
    found = fit(model(), BIG, 0)
    page_bytes = PAGE_SIZE * model().kv_bytes_per_token
    left = BIG.memory * (1 - HEADROOM) - model().weight_bytes
    assert found.pages * page_bytes <= left < (found.pages + 1) * page_bytes
    assert found.kv_tokens == found.pages * PAGE_SIZE


def test_sessions_have_room_for_text_and_candidates() -> None:
    """As many as there are pages for, each with its context and its candidates."""
    found = fit(model(), BIG, 4000)
    assert found.sessions == found.kv_tokens // (-(-(4000 + NODES) // PAGE_SIZE) * PAGE_SIZE)
    assert fit(model(), BIG, 0).context == 8192


def test_gpus_keep_whole_keys_and_values() -> None:
    """Their kernels do not attend to latents, as those of CPUs do."""
    made, cpu = model(kv_numbers=1000, whole_kv_numbers=9000), Device(CPU, 80 * GB, 0.0)
    assert fit(made, BIG, 0).checkpoint.kv_numbers == 9000
    assert fit(made, cpu, 0).checkpoint.kv_numbers == 1000


def test_replicas_for_sessions() -> None:
    """One more as soon as one session is left over."""
    found = fit(model(), BIG, 4000)
    assert replicas_for(found, found.sessions) == 1
    assert replicas_for(found, found.sessions + 1) == 2


def test_a_step_reads_weights_and_texts() -> None:
    """Over the bandwidth; unknown where that is."""
    found = fit(model(), BIG, 4000)
    read = 16 * GB + 3 * 4000 * model().kv_bytes_per_token
    assert found.step_seconds(3) == pytest.approx(read / (2000 * GB))
    assert fit(model(), Device("any", 80 * GB, 0.0), 0).step_seconds(1) is None


def test_a_device_that_is_too_small_is_told_with_both_sizes() -> None:
    """A shorter context would not help, also where the process takes the room."""
    with pytest.raises(
        ConfigError, match=r"^--gpu: the weights of 'eight' take 16 GB .*, and tiny has 0.001"
    ):
        fit(model(), Device("tiny", GB // 1000, 0.0), 0)
    with pytest.raises(ConfigError, match="take 16 GB in bfloat16, its process 4 GB, and cpu has 20 GB"):
        fit(model(), Device(CPU, 20 * GB, 0.0), 0)


def test_sessions_beyond_any_cluster_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes could not count their replicas."""
    with pytest.raises(SystemExit):
        main(["plan", "--target", "T", "--draft", "D", "--gpu", "h100", "--sessions", "9" * 20])
    assert "--sessions: must be a whole number of 1 to 1000000000" in capsys.readouterr().err


def test_a_cpu_shares_its_memory_with_the_process() -> None:
    """On a GPU the process has memory of its own, through which the weights pass."""
    cpu = fit(model(), Device(CPU, 80 * GB, 0.0), 0)
    assert cpu.kv_tokens < fit(model(), BIG, 0).kv_tokens
    assert cpu.host_bytes <= 80 * GB
    assert fit(model(), BIG, 0).host_bytes == model().weight_bytes + PROCESS_BYTES


@pytest.mark.parametrize(
    ("device", "context", "sentence"),
    [
        (
            Device("small", 10 * GB, 1.0),
            0,
            r"the weights of 'eight' take 16 GB .* small has 10 GB",
        ),
        (Device("tight", 18 * GB, 1.0), 8192, "not one session of 8192 tokens fits .* lower it, or choose"),
        (BIG, 9000, "9000 is more than the 8192 of 'eight'; lower it"),
    ],
)
def test_what_does_not_fit(device: Device, context: int, sentence: str) -> None:
    """Is told with what to change."""
    with pytest.raises(ConfigError, match=sentence):
        fit(model(), device, context)


def test_a_context_that_nobody_names() -> None:
    """Has to be given."""
    with pytest.raises(ConfigError, match="names none; set one"):
        fit(model(context_length=0), BIG, 0)


def test_devices() -> None:
    """By name in any case; figures of one's own count more; others need both."""
    assert device_of("H100", None, None) is not None
    assert device_of("h100", 70.0, None).memory == 70 * GB
    assert device_of("mine", 16.0, 500.0) == Device("mine", 16 * GB, 500.0 * GB)
    assert device_of(CPU, None, None).memory > 0
    with pytest.raises(ConfigError, match=r"'h1000' is not known; use one of a10, .*, cpu, or give"):
        device_of("h1000", None, None)


def test_the_table_is_plausible() -> None:
    """No slip of a power of ten: a device reads all of its memory in a hundredth to a tenth of a second."""
    for one in GPUS.values():
        assert 0.01 < one.memory / one.bandwidth < 0.1, one
        assert one.product.startswith("NVIDIA-")


def test_rounded_weights_take_less_of_a_device() -> None:
    """Of seventy billion a device of 141 GB has room for 8 bits, and not for 16."""
    large = {"parameters": 70 * GB, "linear": 68 * GB, "head": GB}
    with pytest.raises(ConfigError, match="another --dtype or --weights"):
        fit(model(**large), GPUS["h200"], 4000)
    assert fit(model(**large, weights="int8"), GPUS["h200"], 4000).sessions > 0


def test_fp8_is_kept_where_there_are_kernels() -> None:
    """On a CPU, and on a GPU where the model has 16 bits; nobody sets that."""
    small = model(weights="fp8", linear=7 * GB)
    assert fit(small, BIG, 4000).checkpoint.weight_bytes < 10 * GB
    assert fit(small, Device(CPU, 80 * GB, 0.0), 4000).checkpoint.weight_bytes < 10 * GB
    assert fit(model(weights="fp8", dtype="float32"), BIG, 4000).checkpoint.weight_bytes == 32 * GB
    one = fit(small, BIG, 4000)
    assert "WEIGHTS" not in overlay(one, one, 1, 1)


def test_experts_are_codes_on_a_cpu() -> None:
    """A GPU has them in 16 bits; a token's step reads some of them."""
    mixed = model(weights="int8", linear=GB, experts=7 * GB, coded_experts=7 * GB, active=0.25)
    cpu, gpu = fit(mixed, Device(CPU, 80 * GB, 0.0), 4000), fit(mixed, BIG, 4000)
    assert cpu.checkpoint.weight_bytes == 8.5 * GB
    assert gpu.checkpoint.weight_bytes == 14 * GB + 8.5 / 8 * GB
    assert cpu.checkpoint.step_bytes(1) == (1 + 7 / 4) * 8.5 / 8 * GB
    assert gpu.checkpoint.step_bytes(1) == (7 / 2 + 8.5 / 8) * GB


def test_rounded_weights_take_16_bits_on_a_gpu() -> None:
    """On a CPU any dtype."""
    wide = model(dtype="float32", weights="int8", linear=7 * GB)
    with pytest.raises(ConfigError, match=r"--weights: int8 takes 16 bits .* --dtype bfloat16"):
        fit(wide, BIG, 4000)
    assert fit(wide, Device(CPU, 80 * GB, 0.0), 4000).sessions > 0


def test_keys_and_values_of_8_bits_double_the_sessions() -> None:
    """On a GPU in 16 bits; elsewhere the flag is refused."""
    small = model(kv_dtype="fp8")
    assert fit(small, BIG, 4000).kv_tokens // PAGE_SIZE in {
        2 * fit(model(), BIG, 4000).pages + by for by in (0, 1)
    }
    for one, device in ((small, Device(CPU, 80 * GB, 0.0)), (model(kv_dtype="fp8", dtype="float32"), BIG)):
        with pytest.raises(ConfigError, match=r"^--kv-dtype: fp8 takes a GPU and 16 bits, .* leave it out$"):
            fit(one, device, 4000)
