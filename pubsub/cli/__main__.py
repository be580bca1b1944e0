"""Run the command line as `python -m pubsub.cli`."""

from pubsub.cli import main

main()
