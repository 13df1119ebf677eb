"""``megatron.tools.cluster.deepspeed_launcher`` for a launcher that was started in another working folder."""

import _project_root  # noqa: F401

from megatron.tools.cluster.deepspeed_launcher import main

if __name__ == "__main__":
    main()
