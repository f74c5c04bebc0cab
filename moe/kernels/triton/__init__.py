"""Triton kernels of the experts: gather, grouped products, SwiGLU and combine, forward and backward.

`backend.grouped_mlp_triton` is the entry; it is imported only when chosen. The kernels are plain Triton and are checked
twice without a GPU: numerically in Triton's interpreter, and as machine code by `ahead_of_time.py`.

One layer is 18 * A * D * F floating-point operations a step, forward and backward, in seven kernels:

| kernel | computes | from |
|---|---|---|
| `up_fwd` | h = x W13^T, a = silu(gate) * up | x gathered by token |
| `down_fwd` | y = a W2^T | |
| `combine` | out = sum over a token's assignments of weight * y, in a fixed order | y by token |
| `down_dgrad` | dh, weight * a, and the weights' gradient <da, a> | dout gathered by token |
| `up_dgrad` | rows of dx = dh W13; `combine` adds them up | |
| `dw2`, `dw13` | gradients of the weights | dout and x gathered by token |

Suffixes beyond the project's: M rows and N columns of a tile, K the width that a product sums over.
"""
