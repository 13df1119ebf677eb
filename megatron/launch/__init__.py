"""From a started process to a rank of the run: environment, rendezvous, hang watchdog, rank failure monitor."""
