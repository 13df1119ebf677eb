"""Pipeline parallelism: the partition into stages and the schedule."""
