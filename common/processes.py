"""How a run ends: shared by the ranks and by what starts them."""

import signal

USER_ERROR_EXIT_CODE = 2
STUCK_EXIT_CODE = 71  # a rank made no progress; the system's EX_OSERR
STOPPED_EXIT_CODE = 75  # saved and to be started again; the system's EX_TEMPFAIL
# What asks a run to stop: schedulers and launchers, Ctrl-C, and Slurm's early warning (--signal=USR1@120).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
