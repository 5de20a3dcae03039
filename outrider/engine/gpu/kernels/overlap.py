"""Lets the launches of kernels overlap: the next one is prepared while this one runs.

CUDA calls it programmatic dependent launch; devices of compute capability 9.0 or newer have it. A kernel that
is launched in this way may begin before the kernels before it have ended.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(OVERLAP: tl.constexpr):
    """Let the next kernel be launched when all programs have called this."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(OVERLAP: tl.constexpr):
    """Wait until all earlier kernels have ended, and what they wrote can be read.

    Each program has to call it at least once, so that the kernels after it can rely on that too. Before it a
    program may read what no kernel of the forward writes: weights, and the buffer of the step.
    """
    if OVERLAP:
        gdc_wait()
