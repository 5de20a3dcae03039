"""Computes a forward's products on the CPU: back ends, threads and layouts of the weights.

processor                the instruction sets that are here
backend                  which kernels compute which dtypes; `choice` takes those of a model
linear                   linear layers with packed weights, put in the place of a model's
matmul                   what all products have in common: jobs for a kernel, shared by threads
row_matmul               products on vectors; `tile_matmul`: on matrix tiles
quantized_matmul         products with codes on vectors; `quantized_tile_matmul`: on matrix tiles
panels                   the layout of weights; `strips`: of codes
experts, heads           many small products: of experts, of the heads of latent attention
layer                    what is computed between the products
worker_pool              the threads
recording                repeats a forward without the interpreter
kernels                  the machine code of all of these; see docs/kernels.md
"""
