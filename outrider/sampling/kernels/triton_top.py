"""A GPU kernel for the largest numbers of long rows. Importing this module needs Triton.

torch's `topk` passes over a row several times, each time with several launches.

Shapes: N rows, C columns, B blocks of a row.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row_stride", "size"])
def top_kernel(
    numbers,  # [N, C] of any float type by row stride
    best,  # [N, B, COUNT] of the same type
    places,  # [N, B, COUNT] int64
    totals,  # [N, B] float32, or anything when WEIGHED is false
    row_stride,
    size,  # C
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """The COUNT largest numbers of each block and their columns, largest first, the first column first among
    equals (grid [N, B]). `totals`: the sum of exp(number - the largest of the block).

    Where a block has fewer numbers, -inf follows, with columns of the row.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    own = tl.arange(0, BLOCK)
    held = tl.load(numbers + row * row_stride + first + own, mask=first + own < size, other=float("-inf"))
    block = row * tl.num_programs(1) + tl.program_id(1)
    if WEIGHED:
        largest = tl.max(held, 0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(totals + block, tl.sum(tl.exp(held - base), 0))
    for rank in range(COUNT):
        number, place = tl.max(held, 0, return_indices=True)
        tl.store(best + block * COUNT + rank, number)
        tl.store(places + block * COUNT + rank, tl.minimum(first + place, size - 1))
        held = tl.where(own == place, float("-inf"), held)
