"""`python -m extractor`."""

from extractor.cli import main

main()
