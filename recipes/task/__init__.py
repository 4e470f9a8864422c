"""Training tasks as LightningModules: loss and metrics of a batch; strategy/ runs the step on devices."""
