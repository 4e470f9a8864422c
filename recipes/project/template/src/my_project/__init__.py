"""The code of this project: what the options in conf/ name by `_target_`."""
