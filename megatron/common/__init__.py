"""What every package may use: errors, environment variables, files and processes. No torch here."""
