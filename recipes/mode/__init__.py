"""What to do with a composed run: one file per `mode=`; each takes the built run and gives an exit code."""
