"""A rank that only joins the others, as every start does, and prints its processor time: start_check.py FOLDER."""

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from common.console import console
from tests.cluster.machines import wait_until
from training.runtime import collectives
from training.runtime.lock import all_ranks_check_shared, lock_folder
from training.runtime.machine_check import describe_installation, digest_of_data
from training.runtime.ranks import read_rank_info

if __name__ == "__main__":
    folder, rank_info = Path(sys.argv[1]), read_rank_info()
    (folder / f"ready_{rank_info.rank}").touch()  # imports take seconds, and not the same on all machines
    wait_until(lambda: len(list(folder.glob("ready_*"))) == rank_info.world_size, "all ranks")
    began = time.process_time()
    with lock_folder(folder / "out") if rank_info.is_main else nullcontext():
        facts = describe_installation(rank_info, digest_of_data(folder / "data") or "")
        hosts = collectives.start(torch.device("cpu"), rank_info, 60, facts)
        all_ranks_check_shared(folder / "out", hosts)
        console.say(f"compared {', '.join(facts)} of {' and '.join(hosts)} in {time.process_time() - began:.3f} s")
        collectives.leave()
