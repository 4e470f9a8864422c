"""Find what is wrong with a run in its curves: a catalogue of symptoms, each a function. No torch, no Lightning."""
