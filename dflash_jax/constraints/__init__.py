"""Constraints on answers: regular expressions, choices and JSON schemas, as automata that read tokens."""
