"""One model in several processes, its ranks. Each rank has a part of every layer (tensor parallel)."""
