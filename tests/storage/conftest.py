"""What is durable is tested here."""

import pytest


@pytest.fixture(autouse=True)
def nobody_pulls_the_plug() -> None:
    """Somebody might: files are waited for until they are on the disk."""
