"""The process: ranks, collectives, stop requests, watchdog, locks, library logs."""
