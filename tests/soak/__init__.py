"""An attack on jobs and server that is too long for the test suite: `python -m tests.soak`."""
