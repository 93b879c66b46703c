"""Batch jobs: files of lines in, files of records out."""
