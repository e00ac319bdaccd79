"""Reads the files of a source, one module per format.

A file that is missing, truncated or not readable is an error, reported in one sentence. The caller
drops and counts bad records in a readable file.
"""
