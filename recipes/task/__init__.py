"""Kinds of learning, as LightningModules: what a batch is worth. How it is carried out lies in strategy/."""
