"""The planner: estimates memory, communication and time of all layouts of a model from its spec."""
