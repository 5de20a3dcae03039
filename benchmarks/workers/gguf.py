"""Convert a checkpoint for llama.cpp with its own converter, from the folder of its sources.

    python -m benchmarks.workers.gguf LLAMA_CPP_FOLDER MODEL_DIR OUTPUT.gguf bf16

The converter knows tokenizers by a hash of what they do with a test text, and not the demo pair's; they are
byte-level BPE as GPT-2's. Prompts are sent as token ids, so that no text is tokenized there.
"""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> None:
    """Convert, leaving the command line to the converter."""
    source, model, output, kind = sys.argv[1:5]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    base = import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf", model, "--outfile", output, "--outtype", kind]
    import_module("convert_hf_to_gguf").main()


if __name__ == "__main__":
    main()
