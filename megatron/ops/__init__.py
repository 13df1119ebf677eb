"""Operations with variants by device or precision, one function or class each, without communication.

Every operation has a plain torch version, which runs on all devices and is the reference in tests. A layer chooses its
variant once, when it is built.

linear.py            matmuls of linear layers, with one weight or several: output, gradients of input and weight
fp8.py               linear layers in FP8
attention.py         the attention core; packed_attention.py restricts it to documents and windows,
                     partial_attention.py to a part of the keys
norm.py              LayerNorm and RMSNorm
activation.py        GELU, SwiGLU, GEGLU, GELU with a bias; residual connections with dropout
cross_entropy.py     statistics and gradient of rows of logits
choices.py           which kernels a device gets, and why; without torch, since the planner uses it as well
"""
