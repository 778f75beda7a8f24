"""The table of docs/planning.md is what the formulas give, and the calibrated efficiencies are what their rows say."""

import statistics

import pytest

from tests.support import PROJECT
from training.planning.published import published_figures, published_table


def test_the_page_has_the_table_that_the_command_prints() -> None:
    page = (PROJECT / "docs" / "planning.md").read_text()
    assert "\n".join(published_table()) in page


def test_clusters_has_rows_of_it() -> None:
    page = (PROJECT / "docs" / "clusters.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith(("| BERT-", "| Ettin"))]
    assert len(rows) == 6
    assert set(rows) <= set(published_table())


def test_calibration_rows_are_met() -> None:
    calibrated = [figure for figure in published_figures() if figure.is_calibration]
    assert len(calibrated) == 2
    for figure in calibrated:
        assert figure.error == pytest.approx(0, abs=0.02)


def test_most_of_the_other_figures_are_within_a_fifth() -> None:
    errors = [abs(figure.error) for figure in published_figures() if not figure.is_calibration]
    assert statistics.median(errors) < 0.15
    assert sum(error < 0.2 for error in errors) >= 0.75 * len(errors)


def test_strong_scaling_is_met_closely() -> None:
    scaled = [figure for figure in published_figures() if figure.unit == "times"]
    assert len(scaled) == 2
    assert all(abs(figure.error) < 0.05 for figure in scaled)
