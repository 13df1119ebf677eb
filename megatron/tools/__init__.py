"""What the command lines in tools/ are made of. Imports the core; the core never imports it."""
