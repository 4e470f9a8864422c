"""Modes of a run (`mode=`): one file per mode, each with a function that returns an exit code.

A function with an argument `run` gets the built run; one with `resolved` gets the `ResolvedRun`, and nothing is built.
`declare_mode` says what it needs.
"""
