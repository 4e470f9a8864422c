"""Modes of a composed run (`mode=`): one file per mode, each with a function that returns an exit code."""
