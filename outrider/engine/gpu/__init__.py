"""The engine on a CUDA device: packed buffers, captured graphs, kernels. See docs/gpu.md.

accelerator                   what the device at hand can do
runner                        a step: one copy to the device, and one graph
plan                          divides a step's attention into tiles; `ordered_plan`: for sums in one order
layout                        the buffer that a step sends; `staging`: the memory that it is sent from
graphs                        captured forwards
operations                    what lies between the products of a fused decoder
attention, mixed_attention    attention over pages; of layers that differ in their heads
one_row                       the forward of one token
ordered_linear                products whose bits do not depend on the batch
coded_linear                  layers that hold only codes; `coded_product` multiplies them
experts                       products of chosen experts
shapes                        checks the arguments of kernels
kernels                       the kernels, in Triton
"""
