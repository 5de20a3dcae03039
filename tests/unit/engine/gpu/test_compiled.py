"""Every kernel compiles for the GPUs that are supported, at the shapes of real models, and fits them.

Nothing runs: Triton's compiler and the assembler that comes with it need no GPU. What is compiled is what the
engine launches, with its own arguments.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton

from outrider.engine.gpu import coded_product as coded_products
from outrider.engine.gpu.attention import KernelAttention
from outrider.engine.gpu.coded_product import coded_product
from outrider.engine.gpu.layout import BufferLayout
from outrider.engine.gpu.plan import PlanSettings, graph_capacity
from outrider.engine.gpu.runner import GraphRunner
from outrider.engine.kv.pages import SequenceKv
from outrider.engine.loaded_model import Geometry, LoadedModel
from outrider.engine.runner import Segment
from outrider.protocol.messages import SamplingParams
from outrider.sampling import chooser
from outrider.sampling.chooser import SamplingRow, choose
from outrider.sampling.history import History
from tests.unit.engine.gpu.shapes_of_models import (
    FAMILIES,
    LLAMA_1B,
    LLAMA_8B,
    MIXED,
    MIXTURES,
    QWEN3_8B,
    model,
    model_of,
    planar,
)
from tests.unit.engine.gpu.stand_in import DEVICE, compiled_for

SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes that a program can have, by compute capability; 8.9 is as 8.6."""
MAX_SPILLED = 448
"""Bytes of a thread that do not fit the 1,020 of its registers. Only attention with windows spills so much,
and that of keys of 8 bits on capability 10.0."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
KERNELS = {
    *("attend_kernel", "combine_kernel", "store_kernel", "move_kernel"),
    *("add_norm_kernel", "rotation_kernel", "one_row_kernel"),
    *("activation_kernel", "peaks_kernel", "listed_kernel", "weights_kernel", "top_kernel"),
    "coded_product_kernel",
}
ORDERED = {"attend_in_order_kernel", "combine_kernel", "product_kernel"}
"""Those of attention with `deterministic`, and in place of the library's products."""


def slow(capability: int) -> Any:
    """A parameter of the long sweep: there the kernel has more room than on the GPU that is left."""
    return pytest.param(capability, marks=pytest.mark.slow)


TIGHTEST = [80, slow(90), slow(100)]
"""Every kernel is compiled for all three in one test; its shapes for the one with the least memory."""


class Resources(NamedTuple):
    """What a compiled kernel takes of a multiprocessor."""

    kernel: str
    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread in memory: what did not fit the registers."""
    shared: int
    """Bytes of a program."""


def compiled(capability: int, run: Callable[[], object]) -> list[Resources]:
    """Compile what is launched meanwhile."""
    with compiled_for(capability) as made:
        run()
    return [_resources(name, result) for name, result in made]


def _resources(name: str, result: Any) -> Resources:
    cubin = Path(result.metadata_group[next(key for key in result.metadata_group if key.endswith(".cubin"))])
    done = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    )
    registers, stack = (int(re.search(rf"{what}:(\d+)", done.stdout)[1]) for what in ("REG", "STACK"))
    return Resources(name, registers, stack, result.metadata.shared)


def attend(
    geometry: Geometry,
    tokens: int,
    *,
    ordered: bool = False,
    fp8: bool = False,
    planned: int | None = None,
    **options: Any,
) -> None:
    """One call of attention over pages of 16."""
    kinds = {"ordered": ordered, "fp8": fp8, "planned": planned}
    attention = KernelAttention(geometry, 1024, 16, torch.bfloat16, DEVICE, **kinds)
    settings = PlanSettings(planned or geometry.queries_per_kv, 16, attention.trash, 33)
    layout = BufferLayout(graph_capacity(tokens, settings))
    buffer = torch.empty(layout.tail_at + 64, dtype=torch.int64, device=DEVICE)
    attention.step = attention.open_step(buffer, layout, 1)
    layer = torch.nn.Module()
    layer.layer_idx = 0
    shapes = [(geometry.query_heads, geometry.head_dim)]
    shapes += [(geometry.kv_heads, width) for width in (geometry.head_dim, geometry.value_dim)]
    parts = (
        torch.empty(1, tokens, heads, width, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
        for heads, width in shapes
    )
    attention.attend(layer, *parts, None, **options)


def forward(sizes: dict[str, int], tokens: int, *, fp8: bool = False, **options: bool) -> None:
    """A step of a fused decoder like Llama's."""
    step(replace(model(sizes, **options), fp8_kv=fp8), tokens)


def step(decoder: LoadedModel, tokens: int) -> None:
    """A step of any."""
    runner = GraphRunner(decoder, 100, 16, buckets=())
    kv = SequenceKv.open(runner.pool, [])
    runner.forward([Segment(kv, [1] * tokens, None, range(tokens))])


def multiply(bits: int, rows: int, out: int, width: int, **kind: bool) -> None:
    """A product of bfloat16 rows with a coded weight."""
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=DEVICE)
    coded_product(x, planar(bits, out, width, **kind), None)


def sample() -> None:
    """Choices of sampled rows, whole and truncated, over a vocabulary of 128 k."""
    logits = torch.empty((8, 128256), device=DEVICE)
    for params in (
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=0.7, seed=1, top_p=0.9),
    ):
        choose(logits, [SamplingRow(params, 10, 0, History([]))] * 8, ())


def everything() -> Iterator[Callable[[], object]]:
    """Each kernel at least once: steps of the shape of Llama 3 8B in tiles of 64 rows and of one token, and
    choices."""
    yield lambda: forward(LLAMA_8B, 33)
    yield lambda: forward(LLAMA_8B, 1)
    yield lambda: attend(Geometry(1, 32, 8, 128, 128), 33)
    yield sample
    yield lambda: multiply(8, 1, 4096, 14336)


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch):
    """Choices are made where a GPU makes them."""
    monkeypatch.setattr(chooser, "has_kernels", lambda device: True)


def fits(each: Resources, capability: int) -> bool:
    """True when a multiprocessor has room for a kernel."""
    return each.stack <= MAX_SPILLED and each.shared <= SHARED_MEMORY[capability]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_for_every_supported_gpu(capability):
    """With what the multiprocessors have of registers and of shared memory."""
    found = [each for run in everything() for each in compiled(capability, run)]
    assert {each.kernel for each in found} == KERNELS
    assert all(fits(each, capability) for each in found), found


@pytest.mark.parametrize(
    ("geometry", "tokens", "options"),
    [
        (Geometry(1, 32, 8, 128, 128), 1, {}),
        (Geometry(1, 32, 8, 128, 128), 33, {"sliding_window": 4096}),
        (Geometry(1, 64, 8, 64, 64), 33, {"sliding_window": 128, "s_aux": torch.empty(64, device=DEVICE)}),
        (Geometry(1, 32, 32, 80, 80), 33, {}),
    ],
    ids=["8B-one-token", "mistral", "gpt-oss", "odd-width"],
)
def test_attention_of_models_compiles(geometry, tokens, options):
    """Flat and high tiles, with windows and sinks, heads of usual widths."""
    found = compiled(90, lambda: attend(geometry, tokens, **options))
    assert all(fits(each, 90) for each in found), found


def test_attention_of_llama_fits_the_smallest_gpu():
    """There it has to do with half of the shared memory."""
    found = compiled(86, lambda: attend(Geometry(1, 32, 8, 128, 128), 33))
    assert all(fits(each, 86) for each in found), found


@pytest.mark.parametrize("capability", [slow(80), 86, slow(90), slow(100), slow(120)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4096, "softcap": 50.0}, {"fp8": True}])
def test_the_widest_heads_fit_every_gpu(capability, options):
    """Those of Gemma, also as Gemma 2 asks for them; more registers spill than of other heads."""
    found = compiled(capability, lambda: attend(Geometry(1, 16, 8, 256, 256), 33, **options))
    (attention,) = (each for each in found if each.kernel == "attend_kernel")
    assert attention.shared <= SHARED_MEMORY[capability]
    assert attention.stack <= 304


@pytest.mark.parametrize("capability", [slow(80), 86, slow(90), slow(100), slow(120)])
@pytest.mark.parametrize("options", [{}, {"fp8": True}, {"ordered": True}])
def test_heads_of_512_fit_every_gpu(capability, options):
    """Those of Gemma 4 31B, in tiles that are planned for its other layers; next to nothing spills."""
    shape = Geometry(1, 32, 4, 512, 512)
    found = compiled(capability, lambda: attend(shape, 33, planned=2, **options))
    assert {"combine_kernel", "store_kernel"} < {each.kernel for each in found}
    assert all(each.stack <= 32 and fits(each, capability) for each in found), found


@pytest.mark.parametrize("capability", [90, 100])
def test_launches_that_overlap_compile(monkeypatch, capability):
    """On devices that have it, each kernel of one token and of several waits for the kernels before it."""
    options = {"OVERLAP": True, "launch_pdl": True}
    for module in ("attention", "one_row", "operations"):
        monkeypatch.setattr(f"outrider.engine.gpu.{module}.overlapping", lambda device: options)
    with compiled_for(capability) as made:
        forward(LLAMA_8B, 1)
        forward(LLAMA_8B, 33)
    names = {name for name, result in made if "griddepcontrol.wait" in result.asm["ptx"]}
    assert names == {name for name, _ in made} - {"move_kernel"}
    assert {"one_row_kernel", "add_norm_kernel"} < names


@pytest.mark.parametrize("capability", TIGHTEST)
@pytest.mark.parametrize("family", MIXED)
def test_layers_that_differ_compile(family, capability):
    """Norms of values, layers without keys and values of their own, one token for all."""
    found = compiled(capability, lambda: step(model_of(MIXED[family]), 1))
    assert {"add_norm_kernel", "rotation_kernel", "attend_kernel"} <= {each.kernel for each in found}
    assert all(fits(each, capability) for each in found), found


@pytest.mark.parametrize(("sizes", "norms"), [(LLAMA_1B, False), (QWEN3_8B, True)], ids=["1B", "qwen3"])
def test_layers_of_models_compile(sizes, norms):
    """Norms over hidden rows and over heads, and rotation, at other widths."""
    found = compiled(90, lambda: forward(sizes, 1, head_norms=norms))
    assert all(fits(each, 90) for each in found), found


@pytest.mark.parametrize("capability", TIGHTEST)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_other_families_compile(family, capability):
    """Norms that centre rows, that take all heads together, with float32 weights; heads that turn in part or
    not at all; activations with and without a gate. Attention with heads of 256 has a test of its own.
    """
    found = compiled(capability, lambda: step(model_of(FAMILIES[family](1)), 1))
    ours = [each for each in found if family != "gemma3" or each.kernel != "attend_kernel"]
    assert {"add_norm_kernel", "rotation_kernel", "activation_kernel"} <= {each.kernel for each in ours}
    assert all(fits(each, capability) for each in ours), ours


EXPERTS = {"choose_kernel", "arrange_kernel", "expert_product_kernel", "expert_sum_kernel"}


@pytest.mark.parametrize("capability", TIGHTEST)
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_compile(family, capability):
    """Weights as they are and turned, 8 to 128 experts; two programs of a product fit a multiprocessor."""
    found = compiled(capability, lambda: step(model_of(MIXTURES[family](1)), 33))
    ours = [each for each in found if each.kernel in EXPERTS | {"bounded_gate_kernel"}]
    assert {each.kernel for each in ours} == EXPERTS | (
        {"bounded_gate_kernel"} if family == "gpt_oss" else set()
    )
    assert all(each.stack == 0 and 2 * each.shared <= SHARED_MEMORY[capability] for each in ours), ours


@pytest.mark.parametrize("capability", [80, 90, slow(100)])
def test_keys_and_values_of_8_bits_compile_for_every_supported_gpu(capability):
    """Stored in two places, read by both kinds of attention; capability 8.0 has no e4m3 of its own."""
    found = compiled(capability, lambda: forward(LLAMA_8B, 33, fp8=True))
    found += compiled(capability, lambda: forward(LLAMA_8B, 33, fp8=True, ordered=True))
    found += compiled(capability, lambda: attend(Geometry(1, 32, 8, 128, 128), 33, fp8=True))
    named = {each.kernel for each in found}
    assert {"rotation_kernel", "store_kernel", "attend_kernel", "attend_in_order_kernel"} <= named
    assert all(fits(each, capability) for each in found), found


HEIGHTS = (1, 64)
"""Rows that take tiles of both heights."""


@pytest.mark.parametrize("capability", TIGHTEST)
@pytest.mark.parametrize(("bits", "kind"), [(8, {}), (4, {"zeros": True}), (8, {"e4m3": True})])
def test_products_with_codes_compile(capability, bits, kind):
    """At the gate and up of Llama 3 8B two programs and more fit a multiprocessor; next to nothing spills."""
    found = []
    for rows in HEIGHTS:
        found += compiled(capability, partial(multiply, bits, rows, 28672, 4096, **kind))
    assert [each.kernel for each in found] == ["coded_product_kernel"] * len(HEIGHTS)
    assert all(each.stack <= 32 and 2 * each.shared <= SHARED_MEMORY[capability] for each in found), found


@pytest.mark.parametrize("capability", TIGHTEST)
def test_parts_of_sums_compile(capability, monkeypatch):
    """A narrow weight has a launch for the parts and one that adds them up."""
    monkeypatch.setattr(coded_products, "PROGRAMS", 1000)
    found = compiled(capability, partial(multiply, 8, 33, 4096, 14336))
    assert [each.kernel for each in found] == ["coded_product_kernel", "sum_parts_kernel"]
    assert all(each.stack == 0 for each in found), found


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_products_with_codes_take_one_instruction_in_tiles_of_any_size(capability):
    """Which `deterministic` rests on: higher tiles would take those of newer devices."""
    found = set()
    for rows in HEIGHTS:
        with compiled_for(capability) as made:
            multiply(8, rows, 28672, 4096)
        found.update(re.findall(r"(mma\.sync\S*|wgmma\S*|tcgen05\S*)", made[0][1].asm["ptx"]))
    assert found == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_smallest_numbers_of_e4m3_are_not_flushed(capability):
    """They are float32 below its normal range until they are multiplied: no instruction takes them for 0."""
    with compiled_for(capability) as made:
        multiply(8, 1, 4096, 4096, e4m3=True)
    code = made[0][1].asm["ptx"]
    assert ".ftz" not in code
    assert "0f7B800000" in code, "2 to the power of 120"


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_cut_out_where_a_product_takes_them(bits):
    """A block's words leave the shared memory once, in the order of the matrix instruction: no place of them
    is put back and read again.
    """
    with compiled_for(90) as made:
        multiply(bits, 1, 4096, 4096)
    code = made[0][1].asm["ttgir"]
    loop = code[code.index("scf.for") :]
    assert loop.count("tt.dot ") == 32 // bits
    assert loop.count("ttg.local_load") == 2 * 32 // bits + 1, "x and scales for each place, and the words"
    assert "tt.load" not in loop[: loop.index("scf.yield")], "all is loaded ahead"


def test_products_with_codes_fit_the_smallest_gpu():
    """With the higher tile and the most places in a word."""
    found = compiled(86, partial(multiply, 4, 64, 28672, 4096, zeros=True))
    assert all(fits(each, 86) for each in found), found


@pytest.mark.parametrize("capability", [80, 86, 90, slow(100)])
def test_deterministic_compiles_for_every_supported_gpu(capability):
    """Products of all widths of Llama 3 8B and attention over them, without a spilled register."""
    found = compiled(capability, lambda: forward(LLAMA_8B, 33, ordered=True))
    ours = [each for each in found if each.kernel in ORDERED]
    assert {each.kernel for each in ours} == ORDERED
    assert all(each.stack == 0 and each.registers <= 255 for each in ours), ours
    assert all(each.shared <= SHARED_MEMORY[capability] for each in ours), ours


@pytest.mark.parametrize(
    ("geometry", "options"),
    [
        (Geometry(1, 32, 8, 128, 128), {"sliding_window": 4096}),
        (Geometry(1, 64, 8, 64, 64), {"sliding_window": 128, "s_aux": torch.empty(64, device=DEVICE)}),
        (Geometry(1, 32, 32, 80, 80), {}),
        (Geometry(1, 16, 8, 256, 256), {"softcap": 50.0}),
    ],
    ids=["mistral", "gpt-oss", "odd-width", "gemma"],
)
def test_attention_in_order_compiles(geometry, options):
    """Its tiles are flat, so that the widest heads fit the smallest GPU too."""
    found = compiled(80, lambda: attend(geometry, 33, ordered=True, **options))
    assert all(each.stack == 0 and fits(each, 86) for each in found), found
