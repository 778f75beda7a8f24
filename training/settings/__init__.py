"""Flags and both JSON files, checked and turned into one frozen Settings."""
