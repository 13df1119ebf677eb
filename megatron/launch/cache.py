"""Where compiled extensions are kept. Standard library alone: hosts that are only looked at run this, too."""

import os


def extensions_folder(environ, prefix: str) -> str:
    """The cache that a run uses: TORCH_EXTENSIONS_DIR, or one for the Python environment at ``prefix`` alone.

    In torch's default folder two environments overwrite each other's, and compile anew at every start.
    """
    if folder := environ.get("TORCH_EXTENSIONS_DIR"):
        return folder
    cache = environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    return os.path.join(cache, "megatron_deepspeed_extensions", prefix.strip(os.sep).replace(os.sep, "-"))
