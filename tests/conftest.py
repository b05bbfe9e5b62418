"""For all tests: examples may take long on a busy machine, which says nothing about them."""

from hypothesis import settings

settings.register_profile("splitserve", deadline=None)
settings.load_profile("splitserve")
