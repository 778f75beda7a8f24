"""Train with faults in a process of its own: python -m tests.faults '[{"kind": "slow_steps", …}]' deepspeed_train.py …

Under torchrun the faults are those of the first attempt.
"""

import json
import os
import sys

from common.hardware import choose_accelerator

if __name__ == "__main__":
    choose_accelerator()  # before DeepSpeed is imported
    import deepspeed_train
    from common.errors import run_command
    from tests.faults import put_in

    faults, *sys.argv = sys.argv[1:]
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        for fault in json.loads(faults):
            put_in(fault, int(os.environ.get("RANK", "0")))
    run_command(deepspeed_train.main)
