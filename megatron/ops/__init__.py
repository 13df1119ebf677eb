"""Operations that devices or precisions compute differently: one function or class for each, without communication.

Every operation has a plain torch version, which works on each device and is the reference that tests compare variants
with. A layer chooses the variant once, when it is built.

linear.py            the matmuls of a linear layer, with one weight or several: output, gradients of input and weight
fp8.py               the same in FP8
attention.py         the core of attention; packed_attention.py and partial_attention.py limit it to documents, windows
                     and parts of the keys
norm.py              LayerNorm and RMSNorm
activation.py        GELU, SwiGLU, GEGLU, GELU with a bias; residual connections with dropout
cross_entropy.py     statistics and gradient of rows of logits
choices.py           which kernels a device gets, and why, without torch, since the planner asks, too
"""
