"""LLVM IR of `Y = X W^T + b` for few rows X and many weights W.

A step of the target reads every weight once and has little to compute with each; what takes time is the
memory. Kernels made for large matrices read, then compute. These overlap the two: while a panel of weights
is multiplied with up to MAX_ROWS rows, the memory far ahead is already being fetched, so that MAX_ROWS rows
cost what one costs.

    panel      PANEL columns of W^T, one after the other in memory, read once from front to back
    step       what one multiply-add takes: of a row 4 bytes, which are two bfloat16 numbers or one float32,
               and of every column of the panel as much
    group      up to MAX_ROWS rows, whose PANEL sums each stay in registers
    block      BLOCK_STEPS of a panel, which stay in the cache while several groups take turns

A sum adds up the steps of a block in order, then the blocks, whatever the other rows are and however many:
a row's bits do not depend on its batch.

The product of a gated layer has LANES columns of the gate and the same ones of up in each panel, and writes
SiLU(gate) up: the activations of the two never leave the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.engine.kernels import silu_ir
from outrider.engine.kernels.numbers_ir import (
    LANES,
    STEP_BYTES,
    SUM,
    Numbers,
    declarations,
    filled,
    masked,
    rounded,
    splat,
    write,
)

VECTORS = 2
PANEL = LANES * VECTORS
MAX_ROWS = 14
"""Their sums take 28 of 32 registers; the weights take two, a row's step in all lanes one."""
PANEL_STEP_BYTES = PANEL * STEP_BYTES
AHEAD_BYTES = 8192
"""How far ahead weights are fetched. Measured on a processor with AVX-512 BF16 for 14 rows and 432 MB of
weights: 17.6, 15.0, 13.1 and 14.8 ms with 512, 2048, 8192 and 32768 bytes."""
BLOCK_STEPS = 1024
"""128 KB of weights; and short sums added up are nearer to the truth than one long one."""


def module(numbers: Numbers, kept: bool) -> str:
    """IR with the functions `product` and `gated`; see `_PRODUCT` for their arguments.

    Weights that are not `kept` are fetched past the cache that the cores share: they would be gone before the
    next step, and what others have there with them.
    """
    locality = 3 if kept else 0
    kernels = (_kernel(numbers, rows, locality) for rows in range(1, MAX_ROWS + 1))
    finish = [_finish(numbers), _gate(numbers)]
    products = [_product("product", _WRITE), _product("gated", _WRITE_GATED)]
    return "\n".join([_declarations(numbers), *kernels, *finish, *products])


def _declarations(numbers: Numbers) -> str:
    multiply_add = numbers.declaration.format(sum=SUM, weights=numbers.weights)
    return f"""{declarations(numbers)}
{"" if multiply_add in declarations(numbers) else multiply_add}
{silu_ir.DECLARATIONS}
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i64 @llvm.umin.i64(i64, i64)"""


def _kernel(numbers: Numbers, rows: int, locality: int) -> str:
    """rows_R: add `steps` steps of one panel to the sums [R, PANEL] of R rows, or set them if `first`."""
    cells = [(row, vector) for row in range(rows) for vector in range(VECTORS)]
    return "\n".join(
        [
            f"define internal void @rows_{rows}(ptr noalias %x, i64 %stride, ptr noalias %w, i64 %steps,"
            " ptr noalias %sums, i1 %first) noinline {",
            "entry:",
            *(line for row in range(rows) for line in _row(row)),
            "  br label %loop",
            "loop:",
            "  %k = phi i64 [ 0, %entry ], [ %k_next, %loop ]",
            *(f"  %a{r}{v} = phi {SUM} [ zeroinitializer, %entry ], [ %b{r}{v}, %loop ]" for r, v in cells),
            *_weights(numbers, locality),
            *(line for row in range(rows) for line in _multiply(numbers, row)),
            "  %k_next = add nuw i64 %k, 1",
            "  %more = icmp ult i64 %k_next, %steps",
            "  br i1 %more, label %loop, label %done",
            "done:",
            *(line for cell in cells for line in _add(*cell)),
            "  ret void",
            "}",
        ]
    )


def _row(row: int) -> Iterator[str]:
    yield f"  %offset{row} = mul i64 %stride, {row}"
    yield f"  %x{row} = getelementptr i8, ptr %x, i64 %offset{row}"


def _add(r: int, v: int) -> Iterator[str]:
    yield f"  %sum{r}{v} = getelementptr i8, ptr %sums, i64 {4 * (r * PANEL + v * LANES)}"
    yield f"  %old{r}{v} = load {SUM}, ptr %sum{r}{v}, align 64"
    yield f"  %before{r}{v} = select i1 %first, {SUM} zeroinitializer, {SUM} %old{r}{v}"
    yield f"  %after{r}{v} = fadd {SUM} %before{r}{v}, %b{r}{v}"
    yield f"  store {SUM} %after{r}{v}, ptr %sum{r}{v}, align 64"


def _weights(numbers: Numbers, locality: int) -> Iterator[str]:
    """Load one step of the panel, and fetch what comes AHEAD_BYTES later."""
    yield f"  %at = mul i64 %k, {PANEL_STEP_BYTES}"
    yield "  %panel = getelementptr i8, ptr %w, i64 %at"
    for v in range(VECTORS):
        yield f"  %p{v} = getelementptr i8, ptr %panel, i64 {64 * v}"
        yield f"  %w{v} = load {numbers.weights}, ptr %p{v}, align 64"
        yield f"  %ahead{v} = getelementptr i8, ptr %p{v}, i64 {AHEAD_BYTES}"
        yield f"  call void @llvm.prefetch.p0(ptr %ahead{v}, i32 0, i32 {locality}, i32 1)"


def _multiply(numbers: Numbers, r: int) -> Iterator[str]:
    """Spread a row's step over all lanes and multiply it with the step of the panel."""
    lanes = f"<{LANES} x i32>"
    yield f"  %step{r} = getelementptr i32, ptr %x{r}, i64 %k"
    yield f"  %one{r} = load i32, ptr %step{r}, align {numbers.bytes}"
    yield f"  %lane{r} = insertelement {lanes} poison, i32 %one{r}, i32 0"
    yield f"  %lanes{r} = shufflevector {lanes} %lane{r}, {lanes} poison, {lanes} zeroinitializer"
    yield f"  %spread{r} = bitcast {lanes} %lanes{r} to {numbers.weights}"
    for v in range(VECTORS):
        places = {"a": f"%a{r}{v}", "w": f"%w{v}", "x": f"%spread{r}", "sum": SUM, "weights": numbers.weights}
        yield f"  %b{r}{v} = {numbers.multiply_add.format(**places)}"


def _finish(numbers: Numbers) -> str:
    """finish: write LANES sums plus bias as numbers, as far as there are columns left."""
    places = {"MASKED": masked("%left"), "WRITTEN": write(numbers, "%total", "%y")}
    return filled(_FINISH, {name: "\n".join(lines) for name, lines in places.items()})


_FINISH = f"""
define internal void @finish(ptr %sums, ptr %bias, ptr %y, i64 %left) noinline {{
  %some = icmp ne i64 %left, 0
  br i1 %some, label %write, label %done
write:
MASKED
  %sum = load {SUM}, ptr %sums, align 64
  %none = icmp eq ptr %bias, null
  br i1 %none, label %store, label %biased
biased:
  %b = load {SUM}, ptr %bias, align 4
  %added = fadd {SUM} %sum, %b
  br label %store
store:
  %total = phi {SUM} [ %sum, %write ], [ %added, %biased ]
WRITTEN
  br label %done
done:
  ret void
}}"""


def _gate(numbers: Numbers) -> str:
    """gate: write SiLU(gate) up of each row's sums [2, LANES], as far as there are columns left.

    Gate, up and activation are rounded as the modules of a model would round them.
    """
    body = [
        *(line for half in ("gate", "up") for line in _half(numbers, half)),
        *silu_ir.silu("%gate", "%silu_exact"),
        *rounded(numbers, "%silu", "%silu_exact"),
        f"  %opened = fmul {SUM} %silu, %up",
        *write(numbers, "%opened", "%ry"),
    ]
    return filled(_GATE, {"MASKED": "\n".join(masked("%left")), "BODY": "\n".join(body)})


def _half(numbers: Numbers, half: str) -> Iterator[str]:
    yield f"  %{half}_exact = fadd {SUM} %{half}_sum, %{half}_b"
    yield from rounded(numbers, f"%{half}", f"%{half}_exact")


_GATE = f"""
define internal void @gate(ptr %sums, ptr %bias, ptr %y, i64 %y_stride, i64 %left, i64 %rows) noinline {{
entry:
MASKED
  %none = icmp eq ptr %bias, null
  br i1 %none, label %row, label %biased
biased:
  %gate_bias = load {SUM}, ptr %bias, align 4
  %up_bias_at = getelementptr float, ptr %bias, i64 {LANES}
  %up_bias = load {SUM}, ptr %up_bias_at, align 4
  br label %row
row:
  %r = phi i64 [ 0, %entry ], [ 0, %biased ], [ %r_next, %row ]
  %gate_b = phi {SUM} [ {splat(-0.0)}, %entry ], [ %gate_bias, %biased ], [ %gate_b, %row ]
  %up_b = phi {SUM} [ {splat(-0.0)}, %entry ], [ %up_bias, %biased ], [ %up_b, %row ]
  %offset = mul i64 %r, {4 * PANEL}
  %gate_at = getelementptr i8, ptr %sums, i64 %offset
  %up_at = getelementptr float, ptr %gate_at, i64 {LANES}
  %gate_sum = load {SUM}, ptr %gate_at, align 64
  %up_sum = load {SUM}, ptr %up_at, align 64
  %y_offset = mul i64 %r, %y_stride
  %ry = getelementptr i8, ptr %y, i64 %y_offset
BODY
  %r_next = add i64 %r, 1
  %r_more = icmp ult i64 %r_next, %rows
  br i1 %r_more, label %row, label %done
done:
  ret void
}}"""


def _product(name: str, writing: str) -> str:
    cases = "\n".join(f"    i64 {rows}, label %case{rows}" for rows in range(1, MAX_ROWS + 1))
    calls = "\n".join(
        f"case{rows}:\n  call void @rows_{rows}(ptr %gx, i64 %x_stride, ptr %gw, i64 %count, ptr %gs,"
        " i1 %first)\n  br label %group_next"
        for rows in range(1, MAX_ROWS + 1)
    )
    return filled(_PRODUCT, {"NAME": name, "CASES": cases, "CALLS": calls, "WRITE": writing})


_WRITE = f"""  %column = mul i64 %p, {PANEL}
  %unbiased = icmp eq ptr %bias, null
  %bias_at = getelementptr float, ptr %bias, i64 %column
  %pb = select i1 %unbiased, ptr null, ptr %bias_at
  %pb_high_at = getelementptr float, ptr %pb, i64 {LANES}
  %pb_high = select i1 %unbiased, ptr null, ptr %pb_high_at
  %left_low = sub i64 %columns, %column
  %left_low_some = call i64 @llvm.umin.i64(i64 %left_low, i64 {LANES})
  %left_high = sub i64 %left_low, %left_low_some
  %y_column = mul i64 %column, %y_bytes
  %y_half = mul i64 %y_bytes, {LANES}
  br label %row
row:
  %r = phi i64 [ 0, %write ], [ %r_next, %row ]
  %rs_bytes = mul i64 %r, {4 * PANEL}
  %rs = getelementptr i8, ptr %sums, i64 %rs_bytes
  %ry_bytes = mul i64 %r, %y_stride
  %ry_all = add i64 %ry_bytes, %y_column
  %ry = getelementptr i8, ptr %y, i64 %ry_all
  call void @finish(ptr %rs, ptr %pb, ptr %ry, i64 %left_low_some)
  %rs_high = getelementptr i8, ptr %rs, i64 {4 * LANES}
  %ry_high = getelementptr i8, ptr %ry, i64 %y_half
  call void @finish(ptr %rs_high, ptr %pb_high, ptr %ry_high, i64 %left_high)
  %r_next = add i64 %r, 1
  %r_more = icmp ult i64 %r_next, %rows
  br i1 %r_more, label %row, label %panel_next"""

_WRITE_GATED = f"""  %column = mul i64 %p, {LANES}
  %bias_offset = mul i64 %p, {PANEL}
  %unbiased = icmp eq ptr %bias, null
  %bias_at = getelementptr float, ptr %bias, i64 %bias_offset
  %pb = select i1 %unbiased, ptr null, ptr %bias_at
  %left = sub i64 %columns, %column
  %y_column = mul i64 %column, %y_bytes
  %py = getelementptr i8, ptr %y, i64 %y_column
  call void @gate(ptr %sums, ptr %pb, ptr %py, i64 %y_stride, i64 %left, i64 %rows)
  br label %panel_next"""

_PRODUCT = f"""
; X [rows, steps * {STEP_BYTES} bytes], rows x_stride bytes apart; W [panels, steps, {PANEL_STEP_BYTES}];
; bias [panels * {PANEL}] float32, or null; Y [rows, columns], rows y_stride bytes apart, numbers of y_bytes;
; sums: room for rows * {PANEL} float32; groups * {MAX_ROWS} >= rows.
define void @NAME(ptr %x, i64 %x_stride, ptr %w, i64 %steps, i64 %panels, ptr %bias, ptr %y, i64 %y_stride,
                     i64 %y_bytes, i64 %columns, i64 %rows, i64 %groups, ptr %sums) {{
entry:
  br label %panel
panel:
  %p = phi i64 [ 0, %entry ], [ %p_next, %panel_next ]
  %p_bytes = mul i64 %steps, {PANEL_STEP_BYTES}
  %p_offset = mul i64 %p, %p_bytes
  %pw = getelementptr i8, ptr %w, i64 %p_offset
  br label %blocks
blocks:
  %s = phi i64 [ 0, %panel ], [ %s_next, %block_next ]
  %s_left = sub i64 %steps, %s
  %count = call i64 @llvm.umin.i64(i64 {BLOCK_STEPS}, i64 %s_left)
  %first = icmp eq i64 %s, 0
  %s_bytes = mul i64 %s, {PANEL_STEP_BYTES}
  %gw = getelementptr i8, ptr %pw, i64 %s_bytes
  %x_bytes = mul i64 %s, {STEP_BYTES}
  %bx = getelementptr i8, ptr %x, i64 %x_bytes
  br label %group
group:
  %g = phi i64 [ 0, %blocks ], [ %g_next, %group_next ]
  %g_next = add i64 %g, 1
  %low_all = mul i64 %g, %rows
  %low = udiv i64 %low_all, %groups
  %high_all = mul i64 %g_next, %rows
  %high = udiv i64 %high_all, %groups
  %size = sub i64 %high, %low
  %gx_bytes = mul i64 %low, %x_stride
  %gx = getelementptr i8, ptr %bx, i64 %gx_bytes
  %gs_bytes = mul i64 %low, {4 * PANEL}
  %gs = getelementptr i8, ptr %sums, i64 %gs_bytes
  switch i64 %size, label %group_next [
CASES
  ]
CALLS
group_next:
  %g_more = icmp ult i64 %g_next, %groups
  br i1 %g_more, label %group, label %block_next
block_next:
  %s_next = add i64 %s, %count
  %s_more = icmp ult i64 %s_next, %steps
  br i1 %s_more, label %blocks, label %write
write:
WRITE
panel_next:
  %p_next = add i64 %p, 1
  %p_more = icmp ult i64 %p_next, %panels
  br i1 %p_more, label %panel, label %done
done:
  ret void
}}
"""
