"""Runs on several hosts: hostfiles, the launcher, the health check, and the elastic agent."""
