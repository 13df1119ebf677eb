"""DeepSpeed's JSON config: its file, the settings that also have a flag, and the config of a run compiled from both."""
