"""Triton kernels. Importing a module of this package needs Triton; `outrider.engine.gpu.accelerator` says
whether it can run. With TRITON_INTERPRET=1 they run on the CPU, slowly."""
