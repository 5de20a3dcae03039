"""LLVM IR of what a layer does to a row between its products: norms, rotation, storing keys and values.

A row is computed by itself in one order of additions, so its bits do not depend on its batch. Results are
rounded where the modules of a model round them, but for the norm, which they round once more before the
weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.engine.kernels.numbers_ir import (
    FLOAT32,
    LANES,
    SUM,
    Numbers,
    declarations,
    filled,
    masked,
    multiply_add,
    read,
    rounded,
    write,
)


def module(numbers: Numbers) -> str:
    """IR with `norm`, `add_norm`, `turn` and `norm_turn`; see the templates for their arguments."""
    norms = [_norm(numbers, adds=adds) for adds in (False, True)]
    turns = [_turn(numbers, normed=normed) for normed in (False, True)]
    return "\n".join([declarations(numbers), _DECLARATIONS, *norms, *turns])


_DECLARATIONS = f"""declare float @llvm.vector.reduce.fadd.v16f32(float, {SUM})
declare float @llvm.sqrt.f32(float)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)"""


def _norm(numbers: Numbers, *, adds: bool) -> str:
    """The function with the residual add or without."""
    added = [
        *read(numbers, "%delta", "%d_at"),
        f"  %exact = fadd {SUM} %before, %delta",
        *rounded(numbers, "%v", "%exact"),
        *write(numbers, "%v", "%x_at"),
    ]
    places = {
        "NAME": ["add_norm" if adds else "norm"],
        "MASKED": masked("%left"),
        "READ": read(numbers, "%before" if adds else "%v", "%x_at"),
        "ADDED": added if adds else [],
        "SQUARED": [multiply_add("%sum_next", "%v", "%v", "%sum")],
        "INVERSE": _inverse("%total"),
        "AGAIN": [*masked("%left2", "%mask2"), *read(numbers, "%w", "%x2_at", "%mask2")],
        "SCALED": _scaled("%w", "%scale_at", "%mask2"),
        "WRITTEN": write(numbers, "%w_scaled", "%y_at", "%mask2"),
        "BYTES": [str(numbers.bytes)],
    }
    return filled(_NORM, {name: "\n".join(lines) for name, lines in places.items()})


def _inverse(total: str) -> Iterator[str]:
    """Make %inverse, one over the root of the mean square plus %eps, in all lanes."""
    yield f"  %mean = fmul float {total}, %share"
    yield "  %floored = fadd float %mean, %eps"
    yield "  %root = call float @llvm.sqrt.f32(float %floored)"
    yield "  %one_over = fdiv float 1.0, %root"
    yield f"  %inverse_one = insertelement {SUM} poison, float %one_over, i32 0"
    yield f"  %inverse = shufflevector {SUM} %inverse_one, {SUM} poison, <{LANES} x i32> zeroinitializer"


def _scaled(value: str, scale_at: str, mask: str) -> Iterator[str]:
    """Make {value}_scaled, times %inverse and the float32 weights at {scale_at}."""
    yield from read(FLOAT32, f"{value}_weight", scale_at, mask)
    yield f"  {value}_unit = fmul {SUM} {value}, %inverse"
    yield f"  {value}_scaled = fmul {SUM} {value}_unit, {value}_weight"


_NORM = f"""
; X and Y [rows, width] numbers; D [rows, width], which add_norm adds to X; scale [width] float32;
; Y = X / sqrt(mean(X^2) + eps) * scale, with share = 1 / width.
define void @NAME(ptr %x, ptr %d, ptr %scale, ptr %y, i64 %width, i64 %rows, float %share, float %eps) {{
entry:
  br label %row
row:
  %r = phi i64 [ 0, %entry ], [ %r_next, %row_next ]
  %first = mul i64 %r, %width
  br label %add
add:
  %c = phi i64 [ 0, %row ], [ %c_next, %add ]
  %sum = phi {SUM} [ zeroinitializer, %row ], [ %sum_next, %add ]
  %left = sub i64 %width, %c
MASKED
  %number = add i64 %first, %c
  %offset = mul i64 %number, BYTES
  %x_at = getelementptr i8, ptr %x, i64 %offset
  %d_at = getelementptr i8, ptr %d, i64 %offset
READ
ADDED
SQUARED
  %c_next = add i64 %c, {LANES}
  %c_more = icmp ult i64 %c_next, %width
  br i1 %c_more, label %add, label %added
added:
  %total = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {SUM} %sum_next)
INVERSE
  br label %scaling
scaling:
  %c2 = phi i64 [ 0, %added ], [ %c2_next, %scaling ]
  %left2 = sub i64 %width, %c2
  %number2 = add i64 %first, %c2
  %offset2 = mul i64 %number2, BYTES
  %x2_at = getelementptr i8, ptr %x, i64 %offset2
  %y_at = getelementptr i8, ptr %y, i64 %offset2
  %scale_at = getelementptr float, ptr %scale, i64 %c2
AGAIN
SCALED
WRITTEN
  %c2_next = add i64 %c2, {LANES}
  %c2_more = icmp ult i64 %c2_next, %width
  br i1 %c2_more, label %scaling, label %row_next
row_next:
  %r_next = add i64 %r, 1
  %r_more = icmp ult i64 %r_next, %rows
  br i1 %r_more, label %row, label %done
done:
  ret void
}}"""


def _turn(numbers: Numbers, *, normed: bool) -> str:
    """The function with a norm over each head or without."""
    places = {
        "NAME": "norm_turn" if normed else "turn",
        "NORMED": filled(_HEAD_NORM, _head_norm(numbers)) if normed else "  br label %columns",
        "BEFORE": "%normed" if normed else "%head",
        "MASKED": "\n".join(masked("%left")),
        "BODY": "\n".join(_rotated(numbers, normed)),
        "BYTES": str(numbers.bytes),
    }
    return filled(_TURN, places)


def _head_norm(numbers: Numbers) -> dict[str, str]:
    places = {
        "MASKED": masked("%n_left", "%n_mask"),
        "LOW": read(numbers, "%n_low", "%n_low_at", "%n_mask"),
        "HIGH": read(numbers, "%n_high", "%n_high_at", "%n_mask"),
        "SQUARED": [
            multiply_add("%n_sum_low", "%n_low", "%n_low", "%n_sum"),
            multiply_add("%n_sum_next", "%n_high", "%n_high", "%n_sum_low"),
        ],
        "INVERSE": _inverse("%n_total"),
        "BYTES": [str(numbers.bytes)],
    }
    return {name: "\n".join(lines) for name, lines in places.items()}


def _rotated(numbers: Numbers, normed: bool) -> Iterator[str]:
    """Columns of both halves of a head: read, perhaps normalised, rotated, written."""
    for half in ("%low", "%high"):
        name = f"{half}_raw" if normed else half
        yield from read(numbers, name, f"{half}_at")
        if normed:
            yield from _scaled(name, f"{half}_scale_at", "%mask")
            yield from rounded(numbers, half, f"{name}_scaled")
    yield from read(FLOAT32, "%cos", "%cos_at")
    yield from read(FLOAT32, "%sin", "%sin_at")
    yield f"  %back = fmul {SUM} %high, %sin"
    yield f"  %back_minus = fneg {SUM} %back"
    yield multiply_add("%new_low", "%low", "%cos", "%back_minus")
    yield f"  %forth = fmul {SUM} %low, %sin"
    yield multiply_add("%new_high", "%high", "%cos", "%forth")
    yield from write(numbers, "%new_low", "%low_at")
    yield from write(numbers, "%new_high", "%high_at")


_HEAD_NORM = f"""  br label %squares
squares:
  %n = phi i64 [ 0, %head ], [ %n_next, %squares ]
  %n_sum = phi {SUM} [ zeroinitializer, %head ], [ %n_sum_next, %squares ]
  %n_left = sub i64 %half, %n
MASKED
  %n_offset = mul i64 %n, BYTES
  %n_low_at = getelementptr i8, ptr %head_at, i64 %n_offset
  %n_high_at = getelementptr i8, ptr %n_low_at, i64 %half_bytes
LOW
HIGH
SQUARED
  %n_next = add i64 %n, {LANES}
  %n_more = icmp ult i64 %n_next, %half
  br i1 %n_more, label %squares, label %normed
normed:
  %n_total = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, {SUM} %n_sum_next)
INVERSE
  br label %columns"""

_TURN = f"""
; QKV [rows, row_bytes]: the first `heads` heads of 2 half numbers are rotated where they are: columns i and
; half + i by the angle of the row's position, whose cosines and sines are table [positions, 2, half] float32.
; norm_turn first divides a head by the root of its mean square plus eps and multiplies it with its row of
; scale [heads, 2 half] float32; share = 1 / (2 half).
; Then of the first `stored` rows entry_bytes from byte own_bytes on are copied to entries [slots,
; entry_bytes].
define void @NAME(ptr %qkv, i64 %row_bytes, i64 %rows, i64 %heads, i64 %half, ptr %table, ptr %positions,
                  ptr %entries, ptr %slots, i64 %stored, i64 %own_bytes, i64 %entry_bytes,
                  ptr %scale, float %share, float %eps) {{
entry:
  %half_bytes = mul i64 %half, BYTES
  br label %row
row:
  %r = phi i64 [ 0, %entry ], [ %r_next, %row_next ]
  %row_offset = mul i64 %r, %row_bytes
  %row_at = getelementptr i8, ptr %qkv, i64 %row_offset
  %position_at = getelementptr i64, ptr %positions, i64 %r
  %position = load i64, ptr %position_at, align 8
  %angle_pair = mul i64 %position, %half
  %angle = mul i64 %angle_pair, 2
  %cosines = getelementptr float, ptr %table, i64 %angle
  %sines = getelementptr float, ptr %cosines, i64 %half
  br label %head
head:
  %h = phi i64 [ 0, %row ], [ %h_next, %head_next ]
  %head_pair = mul i64 %h, %half
  %head_first = mul i64 %head_pair, 2
  %head_offset = mul i64 %head_first, BYTES
  %head_at = getelementptr i8, ptr %row_at, i64 %head_offset
NORMED
columns:
  %c = phi i64 [ 0, BEFORE ], [ %c_next, %columns ]
  %left = sub i64 %half, %c
MASKED
  %c_offset = mul i64 %c, BYTES
  %low_at = getelementptr i8, ptr %head_at, i64 %c_offset
  %high_at = getelementptr i8, ptr %low_at, i64 %half_bytes
  %cos_at = getelementptr float, ptr %cosines, i64 %c
  %sin_at = getelementptr float, ptr %sines, i64 %c
  %scale_first = add i64 %head_first, %c
  %low_scale_at = getelementptr float, ptr %scale, i64 %scale_first
  %high_scale_at = getelementptr float, ptr %low_scale_at, i64 %half
BODY
  %c_next = add i64 %c, {LANES}
  %c_more = icmp ult i64 %c_next, %half
  br i1 %c_more, label %columns, label %head_next
head_next:
  %h_next = add i64 %h, 1
  %h_more = icmp ult i64 %h_next, %heads
  br i1 %h_more, label %head, label %turned
turned:
  %kept = icmp ult i64 %r, %stored
  br i1 %kept, label %keep, label %row_next
keep:
  %slot_at = getelementptr i64, ptr %slots, i64 %r
  %slot = load i64, ptr %slot_at, align 8
  %entry_offset = mul i64 %slot, %entry_bytes
  %entry_at = getelementptr i8, ptr %entries, i64 %entry_offset
  %own_at = getelementptr i8, ptr %row_at, i64 %own_bytes
  call void @llvm.memcpy.p0.p0.i64(ptr %entry_at, ptr %own_at, i64 %entry_bytes, i1 false)
  br label %row_next
row_next:
  %r_next = add i64 %r, 1
  %r_more = icmp ult i64 %r_next, %rows
  br i1 %r_more, label %row, label %done
done:
  ret void
}}"""
