"""`python -m bigmodel` is the `bigmodel` command."""

from .cli.main import main

main()
