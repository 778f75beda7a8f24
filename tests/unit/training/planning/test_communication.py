"""Rings and hierarchies: the textbook times, and what DeepSpeed's stages send."""

from dataclasses import replace

import pytest

from training.planning.accelerators import Cluster, read_table
from training.planning.communication import estimate_communication, reduce_scatter_seconds
from training.planning.memory import ZeroSettings
from training.planning.workload import ParameterCount

H100 = read_table()["H100"]
PARAMETERS = ParameterCount(10**9, 8 * 10**8, ())
SIZE = 2e9


def test_one_node_is_a_ring_over_its_links() -> None:
    cluster = Cluster(H100, 8)
    expected = 7 / 8 * SIZE / (0.8 * 450e9)
    assert reduce_scatter_seconds(SIZE, cluster) == pytest.approx(expected, rel=0.01)


def test_nodes_of_one_device_are_a_ring_over_the_network() -> None:
    expected = 15 / 16 * SIZE / (0.8 * 50e9)
    assert reduce_scatter_seconds(SIZE, Cluster(H100, 1, 16)) == pytest.approx(expected, rel=0.01)


def test_between_nodes_each_device_sends_its_part_only() -> None:
    within = reduce_scatter_seconds(SIZE, Cluster(H100, 8))
    both = reduce_scatter_seconds(SIZE, Cluster(H100, 8, 128))
    expected = 127 / 128 * SIZE / 8 / H100.inter_node_bytes_per_s
    assert both - within == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("zero", "factor"),
    [
        (ZeroSettings(0), 2),
        (ZeroSettings(1), 3),
        (ZeroSettings(1, reduces_to_owners=True), 2),
        (ZeroSettings(2), 2 * 4 + 1),
        (ZeroSettings(3), (1 + 1) * 4),
        (ZeroSettings(3, stage3_max_reuse_distance=1), (1 + 2) * 4),
    ],
)
def test_each_stage_sends_what_deepspeed_does_in_four_micro_steps(zero: ZeroSettings, factor: int) -> None:
    cluster = Cluster(H100, 8)
    found = estimate_communication(PARAMETERS, "bf16", zero, cluster, 4, 0.1)
    assert found.bytes_sent == pytest.approx(7 / 8 * SIZE * factor)
    assert found.exposed_seconds == pytest.approx(found.seconds)  # nothing overlaps unless it is asked for


def test_overlap_hides_reductions_behind_the_backward_pass() -> None:
    cluster, zero = Cluster(H100, 8), ZeroSettings(2, overlaps=True)
    apart = estimate_communication(PARAMETERS, "bf16", replace(zero, overlaps=False), cluster, 1, 10.0)
    hidden = estimate_communication(PARAMETERS, "bf16", zero, cluster, 1, 10.0)
    assert hidden.seconds == apart.seconds
    assert hidden.exposed_seconds == pytest.approx(reduce_scatter_seconds(SIZE, cluster), rel=0.1)  # the all-gather
    short = estimate_communication(PARAMETERS, "bf16", zero, cluster, 1, 0.001)
    assert hidden.exposed_seconds < short.exposed_seconds < apart.exposed_seconds


def test_one_rank_has_nobody_to_send_to() -> None:
    found = estimate_communication(PARAMETERS, "bf16", ZeroSettings(3), Cluster(H100, 1), 4, 0.1)
    assert (found.seconds, found.bytes_sent) == (0, 0)
