"""What services are forked from has imported this: libraries, and what of them is made at its first use.

The code under test is not among it: each process imports that itself.
"""

from __future__ import annotations

from contextlib import suppress

import transformers.generation.utils
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

with suppress(ImportError):  # some processors have none
    from numba.core.registry import cpu_target

    cpu_target.target_context.refresh()
get_checkpoint_conversion_mapping("llama")
