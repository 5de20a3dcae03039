"""One model in several processes, its ranks: each has a part of every layer (tensor parallel)."""
