"""For all tests: examples may take long on a busy machine, which says nothing about them."""

import os

from hypothesis import settings

# Triton looks at this once, when it is first imported; no test here has a GPU to run kernels on.
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("splitserve", deadline=None)
settings.load_profile("splitserve")
