"""`python -m extractor.testing`: the fake server as a process."""

from extractor.core.own_packages import put_first

put_first()

from extractor.testing.fake_server import main  # noqa: E402 - our packages first

main()
