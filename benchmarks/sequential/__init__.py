"""Measurements on real models for the claims on sequential compression: one file each, run by `python -m benchmarks.sequential`."""
