"""Metrics, scores over seeds, bootstrap intervals and paired tests."""
