"""Training tasks as LightningModules: loss and metrics of a batch; strategy/ executes the step on devices."""
