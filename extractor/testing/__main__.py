"""`python -m extractor.testing`: the fake server as a process."""

from extractor.testing.fake_server import main

main()
