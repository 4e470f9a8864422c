"""Run several runs one after the other, each from the weights of one before: the stages of `pipeline=`."""
