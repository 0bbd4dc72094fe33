"""`python -m freight`."""

from freight.cli.main import run

run()
