"""What all tests share: Hypothesis without a deadline, since the machine is busy with other tests, and Triton's interpreter
in place of a GPU, which must be asked for before Triton is imported."""

import os

from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("tracehooks", deadline=None, max_examples=50)
settings.load_profile("tracehooks")
