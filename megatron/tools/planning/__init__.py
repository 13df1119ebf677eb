"""The planner: memory, communication and time of every layout of a model, from its spec."""
