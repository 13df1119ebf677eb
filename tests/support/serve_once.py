"""tools/serve.py with these arguments, which ends after it has answered one request; prints the answer.

Variables: PORT, a free one, and REQUEST, the JSON of a completion.
"""

import os
import runpy
import signal
import sys
import threading
import time
from http.client import HTTPConnection

SECONDS = 120


def ask() -> None:
    """Send the request as soon as the server listens, print the answer, and stop the server."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            connection = HTTPConnection("127.0.0.1", int(os.environ["PORT"]), timeout=SECONDS)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", os.environ["REQUEST"], headers)
            print(f"answer: {connection.getresponse().read().decode()}", flush=True)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)


threading.Thread(target=ask, daemon=True).start()
sys.argv[0] = "tools/serve.py"
sys.path.insert(0, "tools")
runpy.run_path(sys.argv[0], run_name="__main__")
