"""What all tests share: Hypothesis without a deadline, since the machine is busy with other tests."""

from hypothesis import settings

settings.register_profile("tracehooks", deadline=None, max_examples=50)
settings.load_profile("tracehooks")
