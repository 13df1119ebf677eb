"""Reports about runs: recording, reading, charts, and the HTML page."""
