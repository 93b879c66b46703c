"""Measurements of the package, run from a checkout; docs and benchmarks.md say what they found."""
