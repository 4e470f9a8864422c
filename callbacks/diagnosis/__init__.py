"""Diagnose a run from its curves with a catalogue of symptoms, one function each. No torch, no Lightning."""
