"""The training loop and everything around it: launch, evaluation, metrics, report, resume."""
