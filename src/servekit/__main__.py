"""`python -m servekit`: the same as the command `servekit`."""

from servekit.cli.main import main

main()
