"""Signatures of what this project uses of NVIDIA's apex, as they stand in its repository, github.com/NVIDIA/apex.

apex has no numbered releases, so a version is a commit of the repository, the oldest first. Read in
apex/optimizers/fused_adam.py and apex/normalization/fused_layer_norm.py. The published documentation,
nvidia.github.io/apex, describes f7fa414. ``master_weights`` is the later name of ``use_master``; its signature was read
in copies of the file in other repositories and in pull requests 1625 and 1731 of apex, not in a commit of apex itself.
"""

_ADAM = (
    "self, params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, adam_w_mode=True, weight_decay=0.0,"
    " amsgrad=False, set_grad_none=True"
)
_STEP = "self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None"
_NORM = "self, normalized_shape, eps=1e-05"

SIGNATURES: dict[str, dict[str, str]] = {
    "optimizers.FusedAdam.__init__": {
        "f7fa414": f"({_ADAM})",
        "004da4e": f"({_ADAM}, capturable=False, use_master=False)",
        "pull request 1731": f"({_ADAM}, capturable=False, master_weights=False)",
    },
    "optimizers.FusedAdam.zero_grad": {"f7fa414": "(self)", "004da4e": "(self)"},
    "optimizers.FusedAdam.step": {"f7fa414": f"({_STEP})", "004da4e": f"({_STEP}, grad_scaler=None)"},
    "normalization.FusedLayerNorm.__init__": {
        "3c53cf8": f"({_NORM}, elementwise_affine=True)",
        "014f30f": f"({_NORM}, elementwise_affine=True, memory_efficient=False)",
    },
    "normalization.FusedLayerNorm.forward": {"3c53cf8": "(self, input)", "014f30f": "(self, input)"},
    "normalization.MixedFusedLayerNorm.__init__": {"014f30f": f"({_NORM}, *, memory_efficient=False, **kwargs)"},
    "normalization.MixedFusedLayerNorm.forward": {"014f30f": "(self, input)"},
    "normalization.FusedRMSNorm.__init__": {"014f30f": f"({_NORM}, elementwise_affine=True, memory_efficient=False)"},
    "normalization.FusedRMSNorm.forward": {"014f30f": "(self, input)"},
    "normalization.MixedFusedRMSNorm.__init__": {"014f30f": f"({_NORM}, *, memory_efficient=False, **kwargs)"},
    "normalization.MixedFusedRMSNorm.forward": {"014f30f": "(self, input)"},
}
"""Function in the package, version, signature."""
