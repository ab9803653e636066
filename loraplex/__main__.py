"""`python -m loraplex` is the command line."""

from loraplex.cli import main

main()
