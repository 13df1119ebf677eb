"""Operations that devices or precisions compute differently: one function or class for each, without communication.

Every operation has a plain torch version, which works on each device and is the reference that tests compare variants
with. A variant is in ``cpu.py``, ``cuda.py`` or ``apex.py``, by what it needs, and is chosen once: when a layer is
built.

linear.py      the matmuls of a linear layer: forward, gradient of the input, gradient of the weight
norm.py        LayerNorm and RMSNorm
activation.py  GELU, SwiGLU, GEGLU, and GELU with a bias; residual connections with dropout
device.py      what is chosen by, without torch, since the planner asks, too
"""
