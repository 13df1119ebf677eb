"""``megatron.tools.cluster.host_launch`` for a launcher that was started in another folder than the project's."""

import _project_root  # noqa: F401

from megatron.tools.cluster.host_launch import main

if __name__ == "__main__":
    main()
