"""Pipeline parallelism: schedules, and their simulation."""
