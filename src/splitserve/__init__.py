"""splitserve: language models on a Ray cluster, with prefill and decode on separate actors."""

__version__ = "0.1.0"
